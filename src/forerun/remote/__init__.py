"""Measures and tests the speculation of any OpenAI-compatible server over HTTP."""
