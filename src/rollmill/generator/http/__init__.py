"""The HTTP face of a replica: OpenAI's API and a token API, beside gRPC and over the same service."""

from rollmill.generator.http.openapi import openapi
from rollmill.generator.http.protocol import HttpLimits
from rollmill.generator.http.serving import serve_http

__all__ = ["HttpLimits", "openapi", "serve_http"]
