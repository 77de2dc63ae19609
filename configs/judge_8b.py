"""A judge of one's own, as OpenWebRL-Judge-8B: Qwen3-VL-8B imitates the rationales and verdicts of a stronger judge.

    owrl sft judge_8b --sft.data data/judge

The paper: 12.5K varied online rollouts labelled by GPT-4.1, base Qwen3-VL-8B; on 500 held-out ones it agrees with the
labels in 89.8 % (precision 89.5, recall 94.8, F1 92.1). Its optimiser settings and epochs are not published: those here
are ours, the paper's for imitation. An untuned 8B is no judge: trained against one, rewards rose and success fell.
"""

from owrl_jax.config import (
    AgentSettings,
    CheckpointSettings,
    DtypeSettings,
    MeshSettings,
    ModelSettings,
    RunConfig,
    SftSettings,
)


def get_config() -> RunConfig:
    """The configuration; `owrl config judge_8b` prints it."""
    return RunConfig(
        name="judge-8b",
        model=ModelSettings(size="8b", weights="models/Qwen3-VL-8B-Instruct", remat="full"),
        mesh=MeshSettings(fsdp=8),
        dtypes=DtypeSettings(params="float32", compute="bfloat16"),
        # A case has the last three screenshots and the whole log; a reply has at most 2,048 tokens (launcher).
        agent=AgentSettings(screenshots=3, max_context_tokens=32768, max_response_tokens=2048),
        sft=SftSettings(
            data="data/judge",
            epochs=1,
            learning_rate=1e-5,
            warmup_share=0.1,
            groups_per_update=128,  # a case is one turn
            freeze=("vision", "projector"),
            row_tokens=36864,
        ),
        checkpoint=CheckpointSettings(every=25),
    )
