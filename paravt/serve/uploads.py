"""Receiving a video: multipart/form-data, written to disk as it comes, up to a limit."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fastapi import HTTPException, Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from paravt.errors import VideoError
from paravt.serve.videos import Library, Video

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_HEADERS = 64 * 1024
"""Bytes that a form may have around its file."""
_RESERVE = 512 * 1024 * 1024
"""Bytes of the disk that uploads leave free."""
_FORM = "send the file as multipart/form-data, in a part with the name `file`"


async def receive_video(request: Request, library: Library, max_bytes: int) -> Video:
    """The uploaded video, in the library. Raises HTTPException, and leaves nothing behind, if it cannot be taken:
    413 too large, 422 not a form or not a video or too long, 503 the server ends, 507 no room."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise HTTPException(422, _FORM)
    declared = whole_number(request.headers.get("content-length", ""))
    if declared > max_bytes + _HEADERS:
        raise _too_large(max_bytes)
    form, received = _Form(library, max_bytes), 0
    try:
        form.check_room(declared)
        parser = MultipartParser(options[b"boundary"], form.callbacks())
        async for chunk in request.stream():
            received += len(chunk)
            if received > max_bytes + _HEADERS:  # whatever it is that never ends
                raise _too_large(max_bytes)
            if chunk:
                await asyncio.to_thread(parser.write, chunk)
        parser.finalize()
        return await asyncio.to_thread(form.keep)
    except FormParserError:
        raise HTTPException(422, _FORM) from None
    except asyncio.CancelledError:  # by nobody but a server that ends
        raise HTTPException(503, "the server stops") from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload broke off") from None
    except VideoError as error:
        raise HTTPException(422, str(error)) from None
    except OSError as error:
        raise HTTPException(507, f"the upload cannot be stored: {error.strerror or 'input/output error'}") from None
    finally:
        form.drop()


def whole_number(header: str) -> int:
    """0 for what is none."""
    return int(header) if header.isascii() and header.isdigit() and len(header) < 20 else 0


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the file is too large; at most {max_bytes / (1 << 20):g} MB are taken")


class _Form:
    """The parser's callbacks: the file goes to disk, other fields go nowhere."""

    def __init__(self, library: Library, max_bytes: int) -> None:
        self.library, self.max_bytes = library, max_bytes
        self.id: str | None = None
        self.path: Path | None = None
        self._file: BinaryIO | None = None
        self._size = 0
        self._name = self._value = self._disposition = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self.part_begin,
            "on_part_data": self.part_data,
            "on_part_end": self.part_end,
            "on_header_field": self.header_field,
            "on_header_value": self.header_value,
            "on_header_end": self.header_end,
            "on_headers_finished": self.headers_finished,
        }

    def check_room(self, more: int = 0) -> None:
        """Others write at the same time, and not everybody says beforehand how much will come."""
        if shutil.disk_usage(self.library.uploads).free < more + _RESERVE:
            raise HTTPException(507, "no room for uploads on the server's disk")

    def keep(self) -> Video:
        if self.id is None or self.path is None or self._file is not None:
            raise HTTPException(422, _FORM)
        return self.library.keep(self.id, self.path)

    def drop(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could not be written is of no interest any more
                self._file.close()
        if self.id is not None:
            self.library.drop(self.id)

    # ------------------------------------------------------------------ of the parser

    def part_begin(self) -> None:
        self._disposition = b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        self._name = self._value = b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if options.get(b"name") != b"file":
            return
        if self.id is not None:
            raise HTTPException(422, "one file at a time")
        self.id, self.path = self.library.begin(options.get(b"filename", b"").decode("utf-8", "replace"))
        self._file = self.path.open("xb")

    def part_data(self, data: bytes, start: int, end: int) -> None:
        if self._file is None:
            return
        self._size += end - start
        if self._size > self.max_bytes:
            raise _too_large(self.max_bytes)
        self.check_room()
        self._file.write(data[start:end])

    def part_end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
