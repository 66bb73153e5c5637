"""The server: OpenAI's HTTP interface to one LLM, with the library's promises.

`app.py` routes, `schema.py` knows the fields of bodies, `parse.py` makes requests of them, `gate.py` decides who waits
and `answers.py` writes answers. FastAPI, uvicorn and prometheus_client are imported in one file each.
"""
