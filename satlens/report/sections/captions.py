"""What the figures of a page show, in words."""

from __future__ import annotations

from satlens.analysis.result import Result


def caption(result: Result) -> str:
    """What the figure of a result shows; nothing for a kind that is not known here."""
    if result.name == "routes":
        return CAPTIONS["routes_effective"]
    if result.name == "divergence" and result.summary.get("over") == "sublayers":
        return CAPTIONS["divergence_of_reads"]
    if result.name == "ablation" and "out" in set(result.table["sublayer"]):
        return f"{CAPTIONS['ablation']} {CAPTIONS['output']}"
    if result.name != "sparsity":
        return CAPTIONS.get(result.name, "")
    kinds = [kind for kind in ("gates", "routes") if kind in result.summary]
    return " ".join(CAPTIONS[kind] for kind in ("untrained", *kinds))


CAPTIONS = {
    "untrained": (
        "Grey dashes and what is marked untrained: the same model before training, on the same "
        "tokens. Vertical lines: 95 % intervals over documents."
    ),
    "gates": "Heads stand side by side within their layer.",
    "routes": (
        "In the maps a row is a read and a cell a source, as wide as the sublayers that it sums; "
        "its number is the weight of the whole source in per cent (of signed weights, in "
        "hundredths; parallel streams have a column each)."
    ),
    "routes_effective": (
        "Rows are reads, columns what they can consist of: the embedding, then the attention and "
        "the MLP of each layer. Left: the mean coefficient of each; right: its share of the sum of "
        "all components' norms, with the sign of its coefficient. Colours are centred at zero."
    ),
    "categories": (
        "Above, the mean by category; below, the difference of two categories at every gate or "
        "read, raw and with token frequency and position held fixed, with 95 % intervals over "
        "documents. Stars: sign-flip p below 0.05 after max-T adjustment over the grid."
    ),
    "divergence": (
        "Jensen-Shannon divergence between two routes of each read, per token and of the mean "
        "routes, with 95 % intervals over documents. A tied control is 0 by construction; reads "
        "of a single source are 0 by definition."
    ),
    "divergence_of_reads": (
        "Jensen-Shannon divergence between two reads by the shares of their components, per token "
        "and of the mean shares, with 95 % intervals over documents; zero shares stand for what "
        "only the later read can contain."
    ),
    "ablation": (
        "Change in held-out loss when gates or routes are replaced, with 95 % intervals over "
        "documents; to the right of 0 is damage. Framed heads: adjusted p below 0.05."
    ),
    "attribution": (
        "Weight carried against the cost of removing it, gates and routes apart, with 95 % "
        "intervals over documents; labelled units are at least half of the ranks apart."
    ),
    "circuits": (
        "Query heads by layer: direct attribution to the next token's logit of what a head takes "
        "from V_1 and of the rest, copying of the V_1 circuit, and pattern scores with gates on "
        "and off."
    ),
    **dict.fromkeys(
        (f"trajectory_{name}" for name in ("sparsity", "routes", "categories", "divergence")),
        "Along training tokens, a line a layer; 0 is the untrained model.",
    ),
    "output": "The last layer number of routes is the output read.",
    "comparison": (
        "First arm minus second; left of 0 the first is better. Circles are single seeds, diamonds "
        "their mean with a 95 % t interval over other seeds, the grey band the noise floor of "
        "single runs."
    ),
    "tasks": (
        "Share of questions answered; grey dashes are chance, horizontal lines 95 % intervals over "
        "passages."
    ),
    "task_differences": (
        "Score minus that of the baseline; left of 0 it is lower. Horizontal lines are 95 % "
        "intervals over passages."
    ),
    "token_view": (
        "The first tokens, one beside the other: above their loss, below gates and routes. It is "
        "an example, no average."
    ),
    "curves": (
        "Lines are means over seeds, bands run from the lowest to the highest seed. Right: paired "
        "differences, seed by seed."
    ),
}
