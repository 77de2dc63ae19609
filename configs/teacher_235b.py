"""The paper's teacher, Qwen3-VL-235B-A22B-Thinking: what it solves of the seeds, four times each.

    owrl eval models/Qwen3-VL-235B-A22B-Thinking --preset teacher_235b --data.tasks '["data/sft_seeds.jsonl"]'

The paper plays 15,601 seeds four times (62,395 rollouts), lets GPT-4.1 judge them, and imitates per task the shortest
success. A teacher that somebody else serves needs no preset: it is a policy behind an API (`owrl episode --help`).
"""

from owrl_jax.config import (
    AgentSettings,
    BrowserSettings,
    DataSettings,
    DtypeSettings,
    EndpointSettings,
    EvalSettings,
    JudgeSettings,
    MeshSettings,
    ModelSettings,
    RolloutSettings,
    RunConfig,
)


def get_config() -> RunConfig:
    """The configuration; `owrl config teacher_235b` prints it."""
    return RunConfig(
        name="teacher-235b",
        model=ModelSettings(size="235b-a22b", weights="models/Qwen3-VL-235B-A22B-Thinking"),
        # Ours: four key heads bound `tensor`, 128 experts do not bound `expert`.
        mesh=MeshSettings(fsdp=1, expert=8),
        dtypes=DtypeSettings(params="bfloat16", compute="bfloat16"),
        browser=BrowserSettings(viewport=(1280, 1000), step_s=45.0, episode_s=600.0, max_episodes=8),
        # Table 8, evaluation: 30 steps, 4,096 tokens of response, temperature 0.6, top-p 0.95, top-k 20.
        agent=AgentSettings(max_steps=30, max_context_tokens=32768, max_response_tokens=4096),
        rollout=RolloutSettings(temperature=0.6, top_p=0.95, top_k=20),
        data=DataSettings(tasks=("data/sft_seeds.jsonl",)),
        eval=EvalSettings(tasks=1000, samples=4, temperature=0.6),  # four rollouts of a seed
        judge=JudgeSettings(
            kind="rubric",
            # The teacher's rollouts were judged by GPT-4.1, $0.0126 a verdict; the two prices are its list prices.
            endpoint=EndpointSettings(
                url="https://api.openai.com/v1",
                model="gpt-4.1",
                key_env="OPENAI_API_KEY",
                usd_per_million_in=2.0,
                usd_per_million_out=8.0,
                attempts=3,
                attempt_s=120.0,
            ),
            screenshots=3,
            max_usd=100.0,  # ours: about 7,900 verdicts
        ),
    )
