"""Ask a running `paravt serve`, and follow what happens.

    python examples/ask_server.py VIDEO "QUESTION" [ADDRESS] [TOKEN]

The address is the one that `paravt serve` prints (http://127.0.0.1:8765), the token is only needed elsewhere.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx2


def events(client: httpx2.Client, ask: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, data) of each event, to the last."""
    with client.stream("GET", f"/v1/ask/{ask}/events", timeout=None) as stream:
        name = ""
        for line in stream.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                yield name, json.loads(value)


def main(video: str, question: str, address: str = "http://127.0.0.1:8765", token: str = "") -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx2.Client(base_url=address, headers=headers, timeout=600) as client:
        with open(video, "rb") as file:
            uploaded = client.post("/v1/videos", files={"file": (video, file)})
        if uploaded.is_error:
            sys.exit(uploaded.json()["detail"])
        asked = client.post("/v1/ask", json={"video": uploaded.json()["id"], "question": question})
        if asked.is_error:
            sys.exit(asked.json()["detail"])
        for name, data in events(client, asked.json()["id"]):
            if name == "queued":
                print(f"position {data['position']} in the queue")
            elif name == "crop_done":
                crop = data["crop"]
                print(f"{crop['start']} - {crop['end']} s: {crop['report'] or crop['error']}")
            elif name == "done":
                print("answer:", data["episode"]["answer"])
            elif name == "failed":
                sys.exit(data["message"])


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
