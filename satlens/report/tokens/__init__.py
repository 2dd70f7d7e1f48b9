"""Texts whose tokens are coloured by what gates and routes do there."""
