"""The page of all routes, from the OpenAPI document: for people, without anything from elsewhere."""

from typing import Any

from weft.figures.page import template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def routes_page(document: dict[str, Any]) -> str:
    """Each route with what its request may hold."""
    return template("routes.html").render(version=document["info"]["version"], routes=routes(document))


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
