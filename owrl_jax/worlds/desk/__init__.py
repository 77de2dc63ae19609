"""The office: a mailbox with threads and attachments, and a service desk with tickets."""

from owrl_jax.worlds.desk.tasks import SITE

__all__ = ["SITE"]
