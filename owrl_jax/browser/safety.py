"""What a sandbox needs to know about safety, in one record: safe by default, loosened explicitly.

    safety = Safety()                                       # public web, all guards on, robots honoured
    safety = Safety.for_local_worlds({("127.0.0.1", 8123)})  # plus one local site, where buying is the task

`Safety` only carries settings and the shared objects; the rules live in `policy` (URLs and addresses), `egress` (the
proxy that enforces them), `guards` (purchase, login, account, posting), `hosts` (rate, concurrency, cool-down, health),
`robots`, `blocks` (walls), `redact` and `audit`.

The seam, in call order of an episode:

    async with EgressProxy(governor=safety.hosts, audit=safety.audit) as proxy:        # one per process
        launch args: [*EGRESS_FLAGS, *proxy.launch_flags()]                            # fail closed outside a context
        gate = proxy.open(episode="e1", policy=safety.policy)                          # one per episode
        context = await browser.new_context(proxy=gate.playwright_proxy(), service_workers="block", …)
        await gate.sign_in(context, page)                # once, before the first navigation; leaves no history entry
        safety.policy.check(url) -> Refusal | None       # before goto, for the message
        await safety.robots.check(url, gate) -> Refusal | None
        await safety.hosts.pace(host)                    # before a navigation
        safety.guards.check_click(element, page) / check_write(element, page, text) / check_key(key, element, page)
        gate.failure_for(host) -> Failure | None         # after ERR_TUNNEL_CONNECTION_FAILED or a marked 502/504
        gate.refusal_for(host) -> Refusal | None         # after a refused connection
        gate.subscribe(callback)                         # every EgressEvent of this episode
        blocks.classify(facts) -> Wall | None            # facts = PageFacts.read(await page.evaluate(COLLECT_JS), …)
        safety.hosts.report(host, status=…, retry_after=…, detail=…)
        await gate.close()
"""
