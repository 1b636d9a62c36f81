"""Malformed and hostile requests to a gateway, as bytes. Each must be answered with a status below 500, or cut off."""

from __future__ import annotations

import gzip
import json
import zlib

GOOD = b'{"model": "chat", "messages": [], "max_tokens": 1}'


def http(key, *, method=b"POST", target=b"/v1/chat/completions", version=b"1.1", headers=(), body=GOOD, length=None):
    """One request that closes its connection. `length`: the Content-Length, None for the right one, b"" for none."""
    lines = [method + b" " + target + b" HTTP/" + version, b"Host: gateway", b"Connection: close"]
    lines += [b"Authorization: Bearer " + key.encode(), *headers]
    if length != b"":
        lines.append(b"Content-Length: " + (str(len(body)).encode() if length is None else length))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def bodies():
    """Bodies that are no request, or a strange one."""
    chat = b'{"model": "chat", "messages": [], '
    return {
        "null": b"null",
        "number": b"1e999",
        "nan": chat + b'"temperature": NaN}',
        "nan-tokens": chat + b'"max_tokens": NaN}',
        "float-tokens": chat + b'"max_tokens": 1.5}',
        "infinite-tokens": chat + b'"max_tokens": 1e400}',
        "negative-tokens": chat + b'"max_tokens": -1}',
        "text-tokens": chat + b'"max_tokens": "1"}',
        "list-model": b'{"model": ["chat"]}',
        "object-model": b'{"model": {"a": "chat"}}',
        "utf-16": '{"model": "chat"}'.encode("utf-16"),
        "utf-32": '{"model": "chat"}'.encode("utf-32"),
        "bom": b"\xef\xbb\xbf" + GOOD,
        "latin-1": '{"model": "ch\xe4t"}'.encode("latin-1"),
        "duplicate-model": b'{"model": "no-such", "model": "chat", "messages": [], "max_tokens": 1}',
        "duplicate-foreign": b'{"model": "chat", "model": "no-such"}',
        "deep-objects": b'{"model": "chat", "messages": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        "million-keys": b'{"model": "chat", ' + b",".join(b'"k%d":1' % one for one in range(300_000)) + b"}",
        "long-model": b'{"model": "' + b"a" * 1_000_000 + b'"}',
        "trailing": GOOD + GOOD,
        "cut": GOOD[:-5],
        "comment": b"/* a */" + GOOD,
        "single-quotes": GOOD.replace(b'"', b"'"),
        "form": b"model=chat&messages=",
        "multipart": b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nchat\r\n--x--\r\n',
        "huge-n": chat + b'"n": 999999999999999999999999}',
        "n-is-a-list": chat + b'"n": [1]}',
        "priority-is-text": chat + b'"priority": "first"}',
        "giant-prompt": json.dumps({"model": "chat", "prompt": "a " * (4 << 20), "max_tokens": 1}).encode(),
        "bytes": bytes(range(256)),
        "stream-not-utf-8": chat + b'"stream": true, "seed": 1, "other": "\xff"}',
        "stream-huge-number": chat + b'"stream": true, "seed": 1, "other": ' + b"9" * 5000 + b"}",
    }


def requests(key):
    """All of them, by name."""
    bomb = gzip.compress(b'{"model": "chat", "prompt": "' + b"a" * (200 << 20) + b'"}', 9)
    chunk = b"%x\r\n%s\r\n" % (len(GOOD), GOOD)
    found = {f"body-{name}": http(key, body=body) for name, body in bodies().items()}
    found |= {
        "no-key": http("", body=GOOD),
        "wrong-key": http("phx_wrong"),
        "key-of-spaces": http("   "),
        "long-key": http("k" * 5000),
        "key-not-ascii": http("k\xe9y\u2028"),
        "two-keys": http(key, headers=[b"Authorization: Bearer other"]),
        "basic-key": http(key, headers=[]).replace(b"Bearer", b"Basic"),
        "foreign-project": http(key, headers=[b"OpenAI-Project: ../../root"]),
        "long-project": http(key, headers=[b"OpenAI-Project: " + b"p" * 6000]),
        "priority-header": http(key, headers=[b"X-Request-Priority: " + b"9" * 500]),
        "timeout-header": http(key, headers=[b"X-Request-Timeout: nan"]),
        "long-header": http(key, headers=[b"X-A: " + b"a" * 100_000]),
        "many-headers": http(key, headers=[b"X-%d: a" % one for one in range(20_000)]),
        "header-with-nul": http(key, headers=[b"X-A: a\x00b"]),
        "header-without-colon": http(key, headers=[b"nonsense"]),
        "folded-header": http(key, headers=[b"X-A: a\r\n folded"]),
        "space-before-colon": http(key, headers=[b"Transfer-Encoding : chunked"]),
        "request-id": http(key, headers=[b"X-Request-Id: a\tb\x7f" + b"c" * 300]),
        "two-lengths": http(key, headers=[b"Content-Length: 3"]),
        "length-and-chunks": http(
            key, headers=[b"Transfer-Encoding: chunked"], body=b"0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n"
        ),
        "negative-length": http(key, length=b"-5"),
        "length-is-text": http(key, length=b"five"),
        "length-too-short": http(key, length=b"5"),
        "huge-length": http(key, length=b"9" * 25, body=b""),
        "no-length": http(key, length=b""),
        "chunks": http(key, length=b"", headers=[b"Transfer-Encoding: chunked"], body=chunk + b"0\r\n\r\n"),
        "trailers": http(
            key,
            length=b"",
            headers=[b"Transfer-Encoding: chunked", b"Trailer: Authorization"],
            body=chunk + b"0\r\nAuthorization: Bearer other\r\n\r\n",
        ),
        "wrong-chunks": http(key, length=b"", headers=[b"Transfer-Encoding: chunked"], body=b"zz\r\nab\r\n0\r\n\r\n"),
        "huge-chunk": http(key, length=b"", headers=[b"Transfer-Encoding: chunked"], body=b"f" * 30 + b"\r\n"),
        "twice-chunked": http(
            key, length=b"", headers=[b"Transfer-Encoding: chunked, chunked"], body=chunk + b"0\r\n\r\n"
        ),
        "unknown-encoding": http(key, headers=[b"Content-Encoding: snappy"]),
        "not-gzip": http(key, headers=[b"Content-Encoding: gzip"]),
        "gzip-bomb": http(key, headers=[b"Content-Encoding: gzip"], body=bomb),
        "cut-deflate": http(key, headers=[b"Content-Encoding: deflate"], body=zlib.compress(GOOD)[:-8]),
        "wrong-type": http(key, headers=[b"Content-Type: text/xml; charset=utf-7"]),
        "http-1.0": http(key, version=b"1.0"),
        "http-0.9": b"GET /v1/models\r\n\r\n",
        "http-2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "http-9": http(key, version=b"9.9"),
        "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        "absolute-uri": http(key, target=b"http://169.254.169.254/v1/chat/completions"),
        "absolute-other": http(key, method=b"GET", target=b"http://169.254.169.254/latest/meta-data", body=b""),
        "userinfo-uri": http(key, target=b"http://a:b@c:99999/v1/completions"),
        "connect": http(key, method=b"CONNECT", target=b"169.254.169.254:80", body=b""),
        "asterisk": http(key, method=b"OPTIONS", target=b"*", body=b""),
        "trace": http(key, method=b"TRACE", body=b""),
        "unknown-method": http(key, method=b"FROB"),
        "put": http(key, method=b"PUT"),
        "dots": http(key, target=b"/v1/../../etc/passwd"),
        "encoded-dots": http(key, target=b"/v1/%2e%2e/%2e%2e/sleep"),
        "double-slash": http(key, target=b"//v1/chat/completions"),
        "long-target": http(key, target=b"/v1/chat/completions?" + b"a" * 100_000),
        "query-smuggling": http(key, target=b"/v1/chat/completions?a=%0d%0aX: y"),
        "target-with-nul": http(key, target=b"/v1/\x00"),
        "no-host": http(key).replace(b"Host: gateway\r\n", b""),
        "upgrade": http(key, headers=[b"Upgrade: websocket", b"Connection: Upgrade"]),
        "expect": http(key, headers=[b"Expect: 200-ok"]),
        "empty-lines": b"\r\n" * 5000,
        "nothing": b"",
    }
    return found
