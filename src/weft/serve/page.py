"""The page of all routes, from the OpenAPI document: for people, without anything from elsewhere."""

from typing import Any

from jinja2 import Environment

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
PAGE = Environment(autoescape=True).from_string("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>weft</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem }
:root { color-scheme: light dark }
code { font: 14px/1.4 ui-monospace, monospace } summary { cursor: pointer } details { margin: .3rem 0 }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: .2rem 1rem; margin: .5rem 0 1rem 1rem }
dt, dd { margin: 0; overflow-wrap: anywhere }
.method { display: inline-block; min-width: 3.5rem; opacity: .7 }
</style>
<h1>weft {{ version }}</h1>
<p>The routes of this server; <a href="openapi.json">openapi.json</a> describes them for programs.</p>
{% for route in routes %}<details><summary><code><span class="method">{{ route.method }}</span>{{ route.path }}</code>
{{ route.about }}</summary>{% if route.fields %}<dl>{% for name, words in route.fields %}
<dt><code>{{ name }}</code></dt><dd>{{ words }}</dd>{% endfor %}</dl>{% endif %}</details>
{% endfor %}</html>
""")


def routes_page(document: dict[str, Any]) -> str:
    """Each route with what its request may hold."""
    return PAGE.render(version=document["info"]["version"], routes=routes(document))


def routes(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The `method` and `path` of each route, what it is `about`, and its parameters and `fields`, each in words."""
    schemas = document.get("components", {}).get("schemas", {})
    found = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body = schemas.get(_named(content), {})
            given = [(each["name"], each["schema"], each["required"]) for each in route.get("parameters", ())]
            needed = body.get("required", ())
            given += [(name, each, name in needed) for name, each in body.get("properties", {}).items()]
            fields = [(name, _words(each, schemas) + (", needed" if must else "")) for name, each, must in given]
            about = " ".join(route.get("description", "").split())
            found.append({"method": method.upper(), "path": path, "about": about, "fields": fields})
    return found


def _named(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _words(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """A JSON Schema in words."""
    if "description" in schema:
        return str(schema["description"])
    if "$ref" in schema:
        return f"{{{', '.join(schemas[_named(schema)].get('properties', {}))}}}"
    if "anyOf" in schema:
        kinds = sorted(schema["anyOf"], key=lambda each: each.get("type") == "array")
        return " or ".join(_words(each, schemas) for each in kinds if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f'"{each}"' for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_words(schema['items'], schemas)}"
    limits = [f"{sign}\N{NO-BREAK SPACE}{schema[name]:g}" for name, sign in LIMITS.items() if name in schema]
    if abs(schema.get("exclusiveMaximum", 0)) >= 2**31:  # what fits into a number
        limits = []
    return ", ".join([schema.get("type", "anything"), *limits])
