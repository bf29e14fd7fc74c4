"""The search for ways to start a function: nodes, predicted fetches, candidates. Which is chosen, `selection` says."""
