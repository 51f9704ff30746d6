"""Endpoints as reward parts, against a real HTTP server on a port that the system chooses."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl_lab.batch.columns import Batch
from verl_lab.config.load import load_config
from verl_lab.engines.reward import RewardService
from verl_lab.errors import RewardError

BATCH = Batch.from_dict(
    {
        "group_id": [5, 5, 6],
        "sample_id": [0, 1, 0],
        "prompt": ["1+1=", "1+1=", "2+2="],
        "prompt_ids": [[1], [1], [2]],
        "response": ["2", "3", "4"],
        "response_ids": [[3], [4], [5]],
        "answer": ["2", "2", "4"],
    }
)


@pytest.fixture
def part():
    """Starts a server that answers a body by a function of it: (status, answer); its address."""
    servers = []

    def start(answer):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                status, found = answer(
                    json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                )
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(made)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{made.server_address[1]}/score"

    yield start
    for made in servers:
        made.shutdown()
        made.server_close()


def service(part, report=lambda progress: None):
    config = load_config(
        {"model": {"name_or_path": "m"}, "reward": {"parts": {part: 1.0}, "fallback": -7.0}}
    )
    return RewardService(config.model_dump(mode="json"), {}, 0, "cpu", report)


def test_an_address_is_a_part_that_gets_texts_and_columns_but_no_tokens(part):
    bodies = []

    def right(body):
        bodies.append(body)
        wanted = [row["answer"] for row in body["rows"]]
        return 200, {"scores": [r == a for r, a in zip(body["responses"], wanted, strict=True)]}

    url, reports = part(right), []
    scored, stats = service(url, reports.append).score(BATCH, url)
    assert scored[f"reward/{url}"] == [1, 0, 1]
    assert stats == {"errors": 0, "traceback": ""}
    assert bodies[0]["prompts"] == BATCH["prompt"]
    assert not {"prompt_ids", "response_ids"} & bodies[0]["rows"][0].keys()
    assert {"done": 3, "is_back": True} in reports


def test_samples_that_it_never_answers_get_the_fallback_and_count_as_errors(part):
    url = part(lambda body: (503, "busy"))
    scored, stats = service(url).score(BATCH, url)
    assert scored[f"reward/{url}"] == [-7, -7, -7]
    assert stats["errors"] == 3
    assert stats["traceback"] == f"reward {url}: answered 503, 4 times in a row"


@pytest.mark.parametrize("bad", ["high", None, float("nan"), [1.0]])
def test_a_score_that_is_no_number_stops_with_the_samples_name(part, bad):
    url = part(lambda body: (200, [1.0, bad, 1.0]))
    with pytest.raises(RewardError, match=r"row 1 \(group_id 5, sample_id 1\); return a finite"):
        service(url).score(BATCH, url)


def test_a_refusal_stops_with_what_the_server_said(part):
    url = part(lambda body: (400, "no such field"))
    with pytest.raises(RewardError, match='refuses the request with 400: "no such field"'):
        service(url).score(BATCH, url)
