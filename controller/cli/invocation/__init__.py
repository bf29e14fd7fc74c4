"""A call as `fs` makes and shows it: what is sent, errors of language models, and async calls."""
