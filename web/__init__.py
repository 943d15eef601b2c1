"""The web application: the OpenAI-compatible API, the REST API and the live pages."""

from controlplane import lean

lean.install()
