"""The server: OpenAI's and Anthropic's HTTP interfaces to one LLM, with the library's promises.

docs/architecture.md lists the files that a streamed chat enters, in order: `app.py` has the routes, `gate.py` queues
requests, `parse.py` turns bodies into requests of the library, and `answers.py` writes answers.
"""
