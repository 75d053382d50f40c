"""A server for any run: the routes of OpenAI's and Anthropic's APIs, and weft's own."""
