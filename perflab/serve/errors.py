"""What a client is told when its request can't be served, in OpenAI's shape.

Owns status, words and shape. Raised anywhere in the server, turned into an answer in one place.
"""

from __future__ import annotations

import json


class ApiError(Exception):
    """An answer of status 400 to 599; `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = [] if retry_after_s is None else [(b"retry-after", b"%d" % retry_after_s)]
        if status == 401:
            self.headers.append((b"www-authenticate", b"Bearer"))

    @property
    def kind(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case 408:
                return "timeout_error"
            case 429:
                return "rate_limit_error"
            case status if status >= 500:
                return "server_error"
        return "invalid_request_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()
