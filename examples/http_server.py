"""An HTTP server and its clients on localhost, with asyncio: models travel as .npy files.

python examples/http_server.py          # needs aiohttp

GET /task checks a version out; a header has the id of the task. POST /model pushes the model of a client. A request
with
a broken body, or one that is sent twice, gets a receipt with the reason, and changes nothing.
"""

import asyncio
import io

import numpy as np
from aiohttp import ClientSession, web

from afflux import Server
from afflux.rules import fedbuff

CLIENTS, ROUNDS, SIZE = 8, 30, 1000
OPTIMUM = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)


def as_bytes(array: np.ndarray) -> bytes:
    """The array as an .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def from_bytes(body: bytes) -> np.ndarray:
    """The array of an untrusted .npy file."""
    return np.load(io.BytesIO(body), allow_pickle=False)


def application(server: Server) -> web.Application:
    """The two routes."""

    async def task(request: web.Request) -> web.Response:
        opened = server.checkout(request.query["client"], lease=60)
        return web.Response(body=as_bytes(opened.params), headers={"Task": opened.id})

    async def model(request: web.Request) -> web.Response:
        try:
            trained = from_bytes(await request.read())
        except Exception as error:  # any exception of NumPy here is caused by the client's body
            return web.json_response({"status": "unreadable", "reason": str(error)}, status=400)
        receipt = await asyncio.to_thread(server.push, task=request.headers.get("Task", ""), model=trained)
        return web.json_response({"status": receipt.status, "reason": receipt.reason})

    app = web.Application(client_max_size=8 * SIZE + 1024)
    app.add_routes([web.get("/task", task), web.post("/model", model)])
    return app


async def client(name: str, url: str, seconds: float) -> None:
    async with ClientSession(url) as session:
        for _ in range(ROUNDS):
            async with session.get("/task", params={"client": name}) as answer:
                task, params = answer.headers["Task"], from_bytes(await answer.read())
            await asyncio.sleep(seconds)  # train here
            trained = params + 0.2 * (OPTIMUM - params)
            async with session.post("/model", data=as_bytes(trained), headers={"Task": task}) as answer:
                assert (await answer.json())["status"] == "joined"


async def main() -> None:
    server = Server(fedbuff(buffer_size=4), np.zeros(SIZE, np.float32), faults="record")
    runner = web.AppRunner(application(server))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await asyncio.gather(*(client(f"client-{i}", url, 0.001 * (1 + i)) for i in range(CLIENTS)))
    await runner.cleanup()
    error = float(np.abs(server.params - OPTIMUM).max())
    print(f"{server.counts['joined']} models joined, {server.version} versions, largest error {error:.3f}")


if __name__ == "__main__":
    asyncio.run(main())
