"""The peer of `owrl bench browser`: a browser process and an HTTP server per episode, as the reference has it.

    python _browser_peer.py PORT BROWSER

Started as a file, so that it imports nothing but what it needs. `GET /health` answers once the server is up;
`POST /reset {"url": …}` launches the browser, opens one context and page, goes to the address and answers with a
screenshot in JSON. It is spared what the reference does on top at reset (a second navigation, two fixed sleeps of 2
s), so the comparison is in its favour.
"""

from __future__ import annotations

import base64
import sys


def main() -> None:
    """Serves until killed."""
    import uvicorn
    from playwright.async_api import async_playwright
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    port, browser_path = int(sys.argv[1]), sys.argv[2]
    kept = []  # the browser must outlive the request

    async def health(request):
        return JSONResponse({"ok": True})

    async def reset(request):
        url = (await request.json())["url"]
        playwright = await async_playwright().start()
        browser = await playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        context = await browser.new_context(viewport={"width": 1280, "height": 1000})
        page = await context.new_page()
        await page.goto(url, wait_until="load", timeout=20000)
        picture = await page.screenshot()
        kept.extend([playwright, browser, page])
        return JSONResponse({"screenshot": base64.b64encode(picture).decode(), "url": page.url})

    app = Starlette(routes=[Route("/health", health), Route("/reset", reset, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    main()
