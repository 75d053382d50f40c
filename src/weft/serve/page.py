"""The page that documents all routes, made from the OpenAPI document; it loads nothing from elsewhere."""

from typing import Any

from weft.figures.page import template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'"
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
MAX_BOUND = 10**9  # larger bounds only limit the size of integers


def routes_page(document: dict[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document."""
    return template("routes.html").render(version=document["info"]["version"], routes=routes(document))


def routes(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each route's `method`, `path` and description (`about`), and its parameters and `fields` in words."""
    schemas = document.get("components", {}).get("schemas", {})
    rows = []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body = schemas.get(_reference(content), {})
            inputs = [(each["name"], each["schema"], each["required"]) for each in route.get("parameters", ())]
            required = body.get("required", ())
            inputs += [(name, schema, name in required) for name, schema in body.get("properties", {}).items()]
            fields = [(name, _describe(schema, schemas, is_required)) for name, schema, is_required in inputs]
            about = " ".join(route.get("description", "").split())
            rows.append({"method": method.upper(), "path": path, "about": about, "fields": fields})
    return rows


def _reference(schema: dict[str, Any]) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _describe(schema: dict[str, Any], schemas: dict[str, Any], is_required: bool) -> str:
    kind = _type(schema, schemas) + (", required" if is_required else "")
    description = str(schema.get("description", ""))
    return f"{description} ({kind})" if description and kind != "anything" else description or kind


def _type(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the type of a JSON Schema in words, with its bounds."""
    if "$ref" in schema:
        return f"{{{', '.join(schemas[_reference(schema)].get('properties', {}))}}}"
    if "anyOf" in schema:
        kinds = sorted(schema["anyOf"], key=lambda kind: kind.get("type") == "array")
        return " or ".join(_type(kind, schemas) for kind in kinds if kind.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return ", ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"[{'; '.join(_type(item, schemas) for item in schema['prefixItems'])}]"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'], schemas)}"
    bounds = [
        f"{sign}\N{NO-BREAK SPACE}{schema[name]:g}"
        for name, sign in BOUNDS.items()
        if name in schema and abs(schema[name]) < MAX_BOUND
    ]
    return ", ".join([schema.get("type", "anything"), *bounds])
