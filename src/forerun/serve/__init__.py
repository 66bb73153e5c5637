"""The server: OpenAI's and Anthropic's HTTP interfaces to one LLM, with the library's promises.

`app.py` has the routes, `schema.py` the fields of request bodies, `parse.py` turns bodies into requests, `gate.py`
queues them and `answers.py` writes answers. FastAPI, uvicorn and prometheus_client are imported in one file each.
"""
