"""What people look at: episodes as pages, and the harness explained by example. Needs no accelerator stack."""
