"""The OpenAI API: models, chat completions, completions."""
