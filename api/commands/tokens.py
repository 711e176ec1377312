"""`forebay token`: who may use the API of this node."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.api.auth.tokens import TokenBook
from forebay.api.commands import render
from forebay.api.commands.checkpoints import Duration
from forebay.api.commands.staging import AsJson, DryRun
from forebay.core.config import Settings

app = typer.Typer(help="Tokens for the API of this node: create, ls, revoke.", no_args_is_help=True)


@app.command()
def create(
    name: Annotated[str, typer.Option(help="Whose it is; shown in the audit log.")],
    scope: Annotated[list[str], typer.Option(help="read, stage or admin; each holds the ones before it.")],
    tenant: Annotated[str | None, typer.Option(help="Sees and stages for this tenant only.")] = None,
    expires: Annotated[
        Duration | None, typer.Option(parser=Duration, help="For how long: 12h, 30d; for ever if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a token and print it, this once: only a digest of it is kept."""
    book = TokenBook(Settings.load().home)
    token, secret = book.create(name, scope, tenant, expires.seconds if expires else None)
    if json:
        render.print_json({"id": token.id, "name": token.name, "scopes": token.scopes, "tenant": token.tenant,
                           "expires_at": token.expires_at, "token": secret})  # fmt: skip
    else:
        # Alone on stdout, so that a script can keep it.
        render.out.print(secret, markup=False, highlight=False)


@app.command("ls")
def ls(json: AsJson = False) -> None:
    """The tokens there are; never the tokens themselves."""
    tokens = TokenBook(Settings.load().home).all()
    if json:
        render.print_json(tokens)
        return
    rows = [
        (t.id, t.name, t.scopes[-1] if t.scopes else "", t.tenant or "all", render.clock(t.made_at),
         render.clock(t.expires_at) if t.expires_at else "never")
        for t in tokens
    ]  # fmt: skip
    render.print_table(("TOKEN", "NAME", "SCOPE", "TENANT", "MADE", "EXPIRES"), rows)


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(help="Id, or name: all tokens of that name.")],
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """The next request with it is refused."""
    book = TokenBook(Settings.load().home)
    gone = sum(token in (t.id, t.name) for t in book.all()) if dry_run else book.revoke(token)
    if json:
        render.print_json({"revoked": gone, "dry_run": dry_run})
    else:
        render.out.print(f"{gone} {'would be revoked' if dry_run else 'revoked'}")
