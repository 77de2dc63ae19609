"""From a request to a session: everything that can be wrong with a request is found here, before it costs anything.

Runs on threads of its own, beside the engine's: pictures are decoded, positions counted, keys drawn. What is refused is
refused with a reason (`errors.py`). No array of the device is touched.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np

from owrl_jax.engine.errors import BadPicture, BadRequest, PromptTooLong, TruncatedTraining
from owrl_jax.engine.request import Request, SpecialTokens
from owrl_jax.engine.session import MAX_STOPS, ImageRun, Session, digest_of
from owrl_jax.engine.settings import EngineSettings
from owrl_jax.models.processor import BadImage, ImageProcessor, Patches
from owrl_jax.models.qwen3_vl.config import ModelConfig
from owrl_jax.models.qwen3_vl.positions import mrope_positions


class Intake:
    """What is needed to look at requests; its methods may be called from any thread.

    Args:
      config, processor, special, settings: as of `Engine`.
    """

    def __init__(
        self,
        config: ModelConfig,
        processor: ImageProcessor | None,
        special: SpecialTokens,
        settings: EngineSettings,
    ) -> None:
        self.config, self.processor, self.settings = config, processor, settings
        self._stop = tuple(dict.fromkeys((special.im_end, special.endoftext)))
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Patches] = OrderedDict()

    def session(self, number: int, arrived: float, request: Request, future: Any) -> Session:
        """The session of a request.

        Raises:
          BadRequest, or one of its kinds.
        """
        ids = np.asarray(request.ids, np.int64)
        vocab, longest = self.config.text.vocab, self.settings.max_context
        if ids.min() < 0 or ids.max() >= vocab:
            raise BadRequest(f"prompt ids must lie in 0..{vocab - 1}, got {ids.min()}..{ids.max()}")
        if len(ids) >= longest:
            raise PromptTooLong(f"a prompt of {len(ids)} tokens leaves no room in a context of {longest}")
        sampling = request.sampling
        if request.training and (sampling.top_p < 1 or sampling.top_k > 0):
            raise TruncatedTraining(
                f"a response to train on needs top_p=1 and top_k=0, got {sampling.top_p} and {sampling.top_k}: "
                "the learner's log-probs are those of the whole distribution"
            )
        if sampling.top_k >= 2**31:
            raise BadRequest(f"top_k must be below 2**31, got a number of {len(str(sampling.top_k))} digits")
        stop = self._stop if request.stop is None else tuple(dict.fromkeys(request.stop))
        if len(stop) > MAX_STOPS:
            raise BadRequest(f"at most {MAX_STOPS} stop ids are supported, got {len(stop)}")
        if request.top_logprobs > self.settings.top_logprobs:
            raise BadRequest(f"top_logprobs is at most {self.settings.top_logprobs} here, got {request.top_logprobs}")
        images, positions, following = self._images(ids, request.pictures)
        deadline_s = request.deadline_s or self.settings.deadline_s
        return Session(
            number=number,
            request=request,
            future=future,
            positions=positions,
            next_position=following,
            images=images,
            limit=min(sampling.max_new_tokens, longest - len(ids)),
            stop=stop,
            deadline=float("inf") if deadline_s is None else arrived + deadline_s,
            arrived=arrived,
        )

    def _images(self, ids: np.ndarray, pictures: tuple[bytes, ...]) -> tuple[tuple[ImageRun, ...], np.ndarray, int]:
        if pictures and self.config.vision is None:
            raise BadPicture(f"this is a text-only model, but the request has {len(pictures)} pictures")
        merge = self.config.vision.merge if self.config.vision else 2
        found = [(digest_of(data), self._patches(n, data)) for n, data in enumerate(pictures)]
        try:
            rope = mrope_positions(ids, [p.grid for _, p in found], image_token_id=self.config.image_token, merge=merge)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        runs, places = [], np.flatnonzero(ids == self.config.image_token)
        used = 0
        for digest, patches in found:
            start = int(places[used])
            runs.append(ImageRun(start=start, end=start + patches.tokens, digest=digest, patches=patches))
            used += patches.tokens
        return tuple(runs), rope.positions, int(rope.next_position[0])

    def _patches(self, number: int, data: bytes) -> Patches:
        """A decoded picture, from memory if it was asked about lately."""
        digest = digest_of(data)
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
        assert self.processor is not None
        try:
            patches = self.processor.process(data)
        except BadImage as error:
            raise BadPicture(f"picture {number}: {error}") from error
        most = min(self.settings.patch_buckets[-1], self.settings.vision_rows * self.processor.merge_size**2)
        if len(patches.patches) > most:
            raise BadPicture(
                f"picture {number} has {len(patches.patches)} patches and the engine takes {most}: lower max_tokens or "
                "max_area of the image processor, or raise patch_buckets and vision_rows"
            )
        with self._lock:
            self._kept[digest] = patches
            while len(self._kept) > self.settings.pictures_kept:
                self._kept.popitem(last=False)
        return patches
