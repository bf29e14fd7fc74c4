"""Tools: their declaration in requests and prompts, the calls in a model's text, the grammar of forced calls."""
