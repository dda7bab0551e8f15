"""Tables, plots and reports of results. Reads records and published numbers; imports no torch."""
