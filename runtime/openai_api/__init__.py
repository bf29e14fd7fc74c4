"""OpenAI's HTTP API, as far as language models and embedding models share it: fields, errors, models, embeddings."""
