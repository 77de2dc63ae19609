# ruff: noqa: E501  (a table of pages reads best one page after the other)
"""Walls and their decoys as pages: name -> (status, title, body[, expected detail])."""

P = "<p>" + "A paragraph of ordinary words about the things that this site has to offer to its readers. " * 3 + "</p>"
NAV = "<header><nav>" + "".join(f"<a href=/n{i}>Section {i}</a> " for i in range(12)) + "</nav></header>"
FOOT = "<footer><a href=/about>About</a> <a href=/privacy>Privacy</a> <a href=/contact>Contact</a></footer>"
CARDS = "".join(
    f"<div><a href=/p{i}>Product {i}</a> <b>${i}.99</b> <button>Add to cart</button></div>" for i in range(9)
)
COVER = "position:fixed;inset:0;background:#fff;z-index:9999"
BOX = "<div style='width:304px;height:78px;border:1px solid' class={c} data-sitekey=x>I'm not a robot</div>"

# name -> (status, title, body, expected detail)
WALLS = {
    "cloudflare": (403, "Just a moment...", "<h1>shop.example</h1><p>Verifying you are human. This may take a few seconds.</p>"
        "<p>shop.example needs to review the security of your connection before proceeding.</p>", "bot_wall"),
    "titled like a security check, 200": (200, "Security Check", "<h2>Please complete the security check to access "
        "shop.example</h2><p>Why do I have to do this? It proves you are a human.</p>", "bot_wall"),
    "recaptcha page": (200, "Robot check", "<h1>Sorry, we just need to make sure you're not a robot.</h1><form>"
        + BOX.format(c="g-recaptcha") + "<button>Submit</button></form>", "captcha"),
    "type the characters": (200, "Robot Check", "<h4>Enter the characters you see below</h4><p>Sorry, we just need to make sure "
        "you're not a robot.</p><form><input name=field-keywords><button>Continue shopping</button></form>", "captcha"),
    "press and hold": (403, "Access to this page has been denied", "<div id=px-captcha style='width:300px;height:60px'></div>"
        "<p>Press & Hold to confirm you are a human (and not a bot).</p>", "captcha"),
    "unusual traffic": (200, "https://search.example/", "<p>Our systems have detected unusual traffic from your computer "
        "network. This page checks to see if it's really you sending the requests.</p>", "bot_wall"),
    "interruption": (200, "Pardon Our Interruption", "<h1>Pardon Our Interruption...</h1><p>As you were browsing something "
        "about your browser made us think you were a bot.</p>", "bot_wall"),
    "access denied": (403, "Access Denied", "<h1>Access Denied</h1>You don't have permission to access this server."
        "<p>Reference #18.2d</p>", "forbidden"),
    "plain 403": (403, "403 Forbidden", "<center><h1>403 Forbidden</h1></center><hr>nginx", "forbidden"),
    "401": (401, "Unauthorized", "<h1>Unauthorized</h1>", "forbidden"),
    "429": (429, "Too many requests", NAV + P + FOOT, "rate_limited"),
    "500": (500, "Error", "<h1>Internal Server Error</h1>", "http_5xx"),
    "503 in the site's own style": (503, "Shop: back soon", NAV + "<h1>We will be back soon</h1>" + P + FOOT, "http_5xx"),
    "geo": (200, "Stream", "<h1>Sorry!</h1><p>This service is not available in your country.</p>", "geo_block"),
    "451": (451, "Unavailable", "<p>Unavailable due to legal reasons</p>", "geo_block"),
    "login instead of the page": (200, "Log in", "<h1>Welcome back</h1><form><input name=u><input type=password>"
        "<button>Log in</button></form><a href=/forgot>Forgot?</a>", "login_wall"),
    "login overlay": (200, "Profile", NAV + P * 9 + f"<div role=dialog style='{COVER}'><h2>Log in to continue</h2><form><input>"
        "<input type=password><button>Log in</button></form><a href=/signup>Sign up</a></div>", "login_wall"),
    "consent without a button": (200, "News", NAV + P * 9 + f"<div style='{COVER}'><h2>We value your privacy</h2><p>We and our "
        "812 partners store cookies.</p></div>", "consent_dead_end"),
    "empty": (200, "", "", "blank_page"),
    "skeleton": (200, "App", "<div id=root>" + "<div style='height:20px;background:#eee;margin:9px'></div>" * 30 + "</div>",
        "blank_page"),
}  # fmt: skip

DECOYS = {
    "shop page that sells a captcha book": (200, "The CAPTCHA Book", NAV + "<h1>CAPTCHA: are you a human?</h1>" + P + CARDS + FOOT),
    "article on Cloudflare": (200, "Checking your browser: how Cloudflare works", NAV + "<article><h1>Just a moment...</h1><p>You "
        "have seen it: checking your browser before accessing a site. Verify you are human.</p>" + P * 6 + "</article>" + FOOT),
    "small page about verification": (200, "FAQ", "<nav><a href=/>Home</a> <a href=/faq>FAQ</a></nav><article><h1>Why am I asked to "
        "verify that you are human?</h1>" + P * 3 + "</article>" + FOOT),
    "contact form with a badge": (200, "Contact us", NAV + "<form><input name=n><input type=email><textarea></textarea>"
        + BOX.format(c="g-recaptcha") + "<button>Send</button></form>"
        "<div class=grecaptcha-badge style='position:fixed;right:0;bottom:9px;width:256px;height:60px'>protected</div>"),
    "bare form with a captcha": (200, "Register your product", "<form><input name=serial><input name=date><input type=email>"
        + BOX.format(c="h-captcha") + "<button>Send</button></form>"),
    "login link in the header": (200, "Forum", NAV + "<a href=/login>Log in</a><h1>Threads</h1>" + P * 2 + "Please log in to reply."),
    "login page one asked for": (200, "Log in", "<form><input name=u><input type=password><button>Log in</button></form>"),
    "cookie banner with a button": (200, "News", NAV + P * 9 + f"<div style='{COVER}'><h2>We value your privacy</h2><p>We store "
        "cookies.</p><button>Accept all</button><button>Manage</button></div>"),
    "cookie bar at the bottom": (200, "News", NAV + P * 9 + "<div style='position:fixed;bottom:0;left:0;right:0;height:90px;"
        "background:#ddd'>This site uses cookies.</div>"),
    "newsletter overlay that closes": (200, "Shop", NAV + CARDS + f"<div style='{COVER}'><h2>Log in to see your price</h2>"
        "<button aria-label=Close>×</button><input type=password></div>"),
    "sparse but valid": (200, "OK", "<h1>It works!</h1>"),
    "one word of plain text": (200, "", "pong"),
    "only a picture": (200, "", "<img src='data:image/svg+xml,<svg xmlns=%22http://www.w3.org/2000/svg%22 width=%22300%22 "
        "height=%22200%22><rect width=%22300%22 height=%22200%22 fill=%22red%22/></svg>'>"),
    "only a canvas": (200, "Game", "<canvas width=400 height=300></canvas>"),
    "only a form": (200, "Search", "<input name=q>"),
    "404 of the site": (404, "Page not found", NAV + "<h1>Page not found</h1><p>Try our search.</p><input type=search>" + FOOT),
    "bare 404": (404, "404 Not Found", "<h1>Not Found</h1>"),
    "product not sold here": (200, "Lamp", NAV + "<h1>Lamp</h1><p>This item is not available in your region.</p>" + CARDS + FOOT),
    "travel page": (200, "Visa", NAV + "<h1>Which services are not available in your country?</h1>" + P * 4 + FOOT),
    "rich page that says 403": (403, "Archive", NAV + "".join(f"<p><a href=/a{i}>Article {i}</a> {P}</p>" for i in range(50)) + FOOT),
    "security product": (200, "Security check | Antivirus shop", NAV + "<h1>Run a security check</h1>" + P * 2 + CARDS + FOOT),
    "please wait with content": (200, "Please wait", NAV + "<h1>Results</h1>" + CARDS + FOOT),
}  # fmt: skip
