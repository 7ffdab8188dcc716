"""OpenAI's protocol in front of the same service: chat completions, embeddings, models, and its own errors."""
