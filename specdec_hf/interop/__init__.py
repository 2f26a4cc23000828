"""Heads of other formats in and out, engine recipes, model cards, the Hub."""
