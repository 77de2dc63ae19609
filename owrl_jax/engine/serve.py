"""`owrl serve FOLDER`: a checkpoint behind HTTP, from the command line to the last answer.

    owrl serve runs/first/export                        http://127.0.0.1:8730/v1, no token
    owrl serve model --host 0.0.0.0                     anywhere, with a token that lies in ~/.owrl/serve-token

The folder is a model in Hugging Face form: weights, config, tokenizer, image processor. This module is about the
process: options, loading, the listening socket, signals, and the order of ending. On SIGTERM or SIGINT it takes no new
request, lets open ones go on for `drain_s`, and ends with code 0; a second signal skips the waiting. Routes are in
`server.py`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from owrl_jax.engine.chat_prompt import ChatPrompts, PictureLimits
from owrl_jax.engine.server import build_app
from owrl_jax.engine.service import EngineService, ServerConfig
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.serving import address, http_server_class, is_loopback, listen, read_or_make_token, signals

_log = logging.getLogger(__name__)

DEFAULT_TOKEN_FILE = Path("~/.owrl/serve-token")
COMPILE_CACHE = Path("~/.cache/owrl_jax/xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The arguments of `owrl serve`."""

    folder: Annotated[str, tyro.conf.Positional]
    """Folder of the model, or its name on the Hugging Face hub."""
    name: str = ""
    """What clients call it; left out, the folder's own name."""
    host: str = "127.0.0.1"
    """Address to listen on. Beyond loopback, a token is required and made if there is none."""
    port: int = 8730
    """Port; 0 takes a free one."""
    token_file: Path | None = None
    """File with the secret clients must send; made with mode 0600 if it does not exist."""
    max_context: int = 8192
    """Longest prompt plus answer, in tokens."""
    max_tokens: int = 2048
    """Longest answer where the request sets no limit."""
    rows: int = 32
    """Answers that are made at once; further requests wait."""
    chunk_tokens: int = 512
    """Prompt tokens computed in one step."""
    pages: int | None = None
    """KV pages of 16 tokens; left out, enough for all rows at half the longest context."""
    kv: Literal["compute", "int8"] = "compute"
    """How keys and values are stored."""
    max_picture_tokens: int = 2048
    """Pictures are made smaller until they take no more."""
    max_pictures: int = 32
    """Pictures of one request."""
    max_body_mib: int = 64
    """Longest request body."""
    max_open: int = 512
    """Requests at one time; further ones are told to come back."""
    deadline_s: float | None = 600.0
    """A request that takes longer fails."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and arithmetic; auto: float32 on a CPU, bfloat16 elsewhere."""
    compile_cache: Path | None = COMPILE_CACHE
    """Where compiled programs are kept, so that the next start is quick."""
    drain_s: float = 30.0
    """After SIGTERM, how long open requests may go on."""
    log_level: str = "info"


def main(argv: list[str]) -> int:
    """Serves until a signal comes. Returns the exit code: 0 after a clean end, 2 for a wrong call."""
    options = tyro.cli(ServeOptions, args=argv, prog="owrl serve", description=__doc__)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("jax").setLevel(logging.WARNING)
    try:
        return asyncio.run(serve(options))
    except (ValueError, OSError) as error:
        print(f"owrl serve: {error}", file=sys.stderr)  # noqa: T201 - a command talks to its user
        return 2


async def serve(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns 0.

    Raises:
      ValueError: for a folder that is no model, options that do not fit it, a token file that others may read.
      OSError: if a file or the address cannot be had.
    """
    import uvicorn

    token, token_from = _token(options)
    config = ServerConfig(
        model=options.name or _last_part(options.folder),
        host=options.host,
        port=options.port,
        token=token,
        body_bytes=options.max_body_mib << 20,
        pictures=PictureLimits(count=options.max_pictures),
        max_open=options.max_open,
        default_max_tokens=options.max_tokens,
    )
    listener = listen(options.host, options.port)  # before minutes of loading, not after
    engine, prompts, params = await asyncio.to_thread(_load, options, config.pictures)
    async with engine:
        await asyncio.to_thread(engine.publish, 0, params)
        del params
        service = EngineService(engine, prompts, config)
        server = http_server_class()(
            uvicorn.Config(
                build_app(service),
                log_level="warning",
                access_log=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        url = f"{address(options.host, listener)}/v1"
        print(f"owrl serve: {url} ({token_from}), model {config.model}", flush=True)  # noqa: T201
        with signals() as (stop, hurry):
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="http server")
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            service.draining = True
            _log.info("draining: %d requests open, at most %g s", service.open, options.drain_s)
            waiting = asyncio.create_task(_until_idle(service, options.drain_s), name="drain")
            await asyncio.wait({waiting, hurry}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            server.should_exit = True
            await serving
    return 0


def _last_part(folder: str) -> str:
    return Path(folder).resolve().name


async def _until_idle(service: EngineService, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while service.open and time.monotonic() < end:  # noqa: ASYNC110 - once in a process's life
        await asyncio.sleep(0.05)


def _token(options: ServeOptions) -> tuple[str | None, str]:
    if options.token_file is None and is_loopback(options.host):
        return None, "no token"
    path = options.token_file or DEFAULT_TOKEN_FILE
    return read_or_make_token(path), f"token in {path.expanduser()}"


def _load(options: ServeOptions, limits: PictureLimits) -> tuple[Any, ChatPrompts, Any]:
    """Engine, prompts and weights of a model folder."""
    import jax

    from owrl_jax.engine.engine import Engine
    from owrl_jax.models import hf
    from owrl_jax.models.processor import ImageProcessor
    from owrl_jax.models.run import Run
    from owrl_jax.models.tokenizer import load_tokenizer

    if options.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.compile_cache.expanduser()))
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    begin = time.perf_counter()
    folder = hf.local_folder(options.folder)
    tokens = load_tokenizer(folder)
    model, params = hf.load(folder, dtype=dtype)
    processor = None
    if model.vision is not None:
        processor = dataclasses.replace(ImageProcessor.load(folder), max_tokens=options.max_picture_tokens)
    _log.info("loaded %s in %.1f s, %s on %s", folder, time.perf_counter() - begin, dtype, jax.devices()[0])
    engine = Engine(
        model,
        processor=processor,
        special=tokens.special,
        settings=_settings(options, processor.merge_size if processor else 2),
        run=Run(compute=dtype),
    )
    begin = time.perf_counter()
    engine.start()
    _log.info("programs compiled in %.1f s", time.perf_counter() - begin)
    return engine, ChatPrompts(tokens, processor, limits), params


def _settings(options: ServeOptions, merge: int) -> EngineSettings:
    """The engine's sizes. Few buckets: each is a program to compile."""
    page = EngineSettings.page_tokens
    patches = options.max_picture_tokens * merge**2
    return EngineSettings(
        max_context=-(-options.max_context // page) * page,
        pages=options.pages,
        decode_rows=tuple(sorted({1, min(8, options.rows), options.rows})),
        chunk_tokens=tuple(sorted({min(64, options.chunk_tokens), options.chunk_tokens})),
        patch_buckets=tuple(sorted({min(1024, patches), patches})),
        vision_rows=4 * options.max_picture_tokens,
        max_queue=options.max_open,
        deadline_s=options.deadline_s,
        kv=options.kv,
    )
