"""A page in Chromium, with what it complained about and what it asked for, and questions to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HELPERS = (Path(__file__).parent / "helpers.js").read_text(encoding="utf-8")
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(event.violatedDirective + " " + event.blockedURI));
window.longest = 0;
new PerformanceObserver((list) => list.getEntries().forEach(
  (entry) => { window.longest = Math.max(window.longest, entry.duration); })
).observe({ type: "longtask", buffered: true });
"""


class Screen:
    """One page that was opened from disk."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page = page
        self.path = path
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, dialogs."""
        self.requests: list[str] = []
        """Addresses asked for besides the page itself and data in it."""
        address = path.resolve().as_uri()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: self._asked(request.url, address))
        page.on("websocket", lambda socket: self.requests.append(socket.url))
        page.add_init_script(WATCH)
        page.add_init_script(HELPERS)
        page.goto(address)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _dialog(self, dialog: Any) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, url: str, own: str) -> None:
        if url.split("#")[0] != own and not url.startswith(("data:", "blob:", "about:")):
            self.requests.append(url)

    # -- what is wrong -----------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Console errors, requests and violations of the policy so far; none of them is right."""
        violations = self.page.evaluate("window.violations")
        return [*self.complaints, *self.requests, *violations]

    def overflow(self) -> list[str]:
        """Elements that make the page wider than its window."""
        return self.page.evaluate("checks.overflow()")

    def low_contrast(self, least: float = 4.5) -> list[str]:
        """Visible texts whose contrast with what is behind them is below ``least``."""
        return self.page.evaluate("(least) => checks.lowContrast(least)", least)

    def unnamed(self) -> list[str]:
        """Controls without a name for a screen reader."""
        return self.page.evaluate("checks.unnamed()")

    def problems(self) -> list[str]:
        """Everything above that a look at the page as it stands can find."""
        return [
            *(f"wider than the window: {each}" for each in self.overflow()),
            *(f"contrast {each}" for each in self.low_contrast()),
            *(f"no name: {each}" for each in self.unnamed()),
        ]

    def walk_faults(self) -> list[str]:
        """What the Tab key misses, or reaches without showing it."""
        expected = self.page.evaluate("checks.reachable()")
        stops = self.walk()
        reached = {stop["id"] for stop in stops}
        caught = stops[-1:] if len(reached) < len(stops) else []
        return [
            *(f"catches the focus: {stop['place']}" for stop in caught),
            *(f"not reached: {each['place']}" for each in expected if each["id"] not in reached),
            *(f"focus does not show: {stop['place']}" for stop in stops if not stop["shown"]),
            *(f"focus out of view: {stop['place']}" for stop in stops if not stop["inside"]),
        ]

    # -- doing things ------------------------------------------------------------------------------

    def look(self, scheme: str) -> None:
        """Light or dark, as the system asks for it."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.wait_for_timeout(50)

    def unfold(self) -> None:
        """Open every fold."""
        self.page.evaluate(
            "document.querySelectorAll('details').forEach((each) => each.open = true)"
        )

    def walk(self) -> list[dict]:
        """Where Tab goes from the top until it leaves the page: what has the focus, and how.

        A page that catches the focus ends with the stop that came a second time.
        """
        self.page.evaluate("checks.startWalk()")
        seen: list[dict] = []
        while True:
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate("checks.focused()")
            if stop is None or (seen and stop["id"] == seen[0]["id"]):
                return seen
            seen.append(stop)
            if stop["id"] in {earlier["id"] for earlier in seen[:-1]}:
                return seen

    def downloads(self, folder: Path) -> dict[str, bytes]:
        """Every download that the page offers, by file name, taken by the keyboard."""
        buttons = self.page.locator("[data-download]")
        found = {}
        for k in range(buttons.count()):
            with self.page.expect_download() as waiting:
                buttons.nth(k).press("Enter")
            name = waiting.value.suggested_filename
            assert name not in found, f"two downloads are called {name}"
            waiting.value.save_as(folder / name)
            found[name] = (folder / name).read_bytes()
            self.page.wait_for_timeout(110)  # Chromium drops an eleventh download within a second
        return found

    def shoot(self, folder: Path | None, name: str, whole: bool = False) -> None:
        """A screenshot, where somebody wants one."""
        if folder is not None:
            self.page.screenshot(path=folder / f"{name}.png", full_page=whole)
