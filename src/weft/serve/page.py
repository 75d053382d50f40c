"""The page of all routes, from the OpenAPI document: for people, without anything from elsewhere."""

import json
from typing import Any

from jinja2 import Environment

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
PAGE = Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>weft</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
:root { color-scheme: light dark }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow-x: auto } summary { cursor: pointer }
.method { display: inline-block; min-width: 3.5rem; opacity: .7 }
</style>
<h1>weft {{ version }}</h1>
<p>The routes of this server; <a href="openapi.json">openapi.json</a> describes them for programs.</p>
{% for route in routes %}<details><summary><code><span class="method">{{ route.method }}</span>{{ route.path }}</code>
{{ route.about }}</summary>{% if route.body %}<pre>{{ route.body }}</pre>{% endif %}</details>
{% endfor %}</html>
""")


def routes_page(document: dict[str, Any]) -> str:
    """Each route with what its body may hold."""
    schemas = document.get("components", {}).get("schemas", {})
    routes = []
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            content = about.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body = schemas.get(content.get("$ref", "").rpartition("/")[2])
            described = None if body is None else json.dumps(body.get("properties"), indent=1, ensure_ascii=False)
            routes.append(
                {"method": method.upper(), "path": path, "about": about.get("description", ""), "body": described}
            )
    return PAGE.render(version=document["info"]["version"], routes=routes)
