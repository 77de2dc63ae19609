"""The harness between policy and browser: tools, prompt, parser, context, episodes. No accelerator stack."""
