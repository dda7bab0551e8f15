"""Records on disk: what cells produced. Imports no torch."""
