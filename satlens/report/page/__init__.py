"""A page: its frame, the markup of its parts, its tables."""
