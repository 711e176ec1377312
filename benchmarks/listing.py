"""An S3 server that lists: any number of objects, in pages, made up as they are asked for.

For measuring what a listing of millions costs the client; there is nothing behind the names.
https://docs.aws.amazon.com/AmazonS3/latest/API/API_ListObjectsV2.html
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

_PAGE = 1000


@contextmanager
def listing_server(objects: int) -> Iterator[str]:
    """Its endpoint; every bucket holds `shards/0000000.tar` and so on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            start = int(query.get("continuation-token", ["0"])[0])
            body = _page(start, min(start + _PAGE, objects), objects).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _page(start: int, end: int, objects: int) -> str:
    items = "".join(
        f"<Contents><Key>shards/{number:07d}.tar</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"{number:032x}"</ETag><Size>104857600</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for number in range(start, end)
    )
    more = end < objects
    token = f"<NextContinuationToken>{end}</NextContinuationToken>" if more else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult '
        f'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><Prefix></Prefix>'
        f"<KeyCount>{end - start}</KeyCount><MaxKeys>{_PAGE}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{items}</ListBucketResult>"
    )
