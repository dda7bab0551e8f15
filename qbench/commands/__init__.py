"""The commands, by what they are for: their arguments, and what they call."""
