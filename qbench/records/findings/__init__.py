"""What is wrong with records: rules, each of which finds one kind of mistake."""
