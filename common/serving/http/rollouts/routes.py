"""The routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from common.decoding import ForgetKV, ReleaseMemory, ResumeMemory
from common.serving.http.app import refusals
from common.serving.http.orders import refuse_unsupported
from common.serving.http.rollouts.asking import Rollouts
from common.serving.http.rollouts.fields import ContinueFields, PauseFields, ReplaceFields, TagFields
from common.serving.http.service import Service
from common.serving.messages import Continue, Pause

_PAUSE, _CONTINUE, _ALL = PauseFields(), ContinueFields(), TagFields()
_DONE = {"success": True}


def add_rollouts(app: FastAPI, service: Service) -> None:
    """Add the routes to a server, whose API keys guard them as they do all others."""
    rollouts, refused = Rollouts(service.engine), refusals(400, 401, 403, 408, 409, 413, 503)

    @app.post("/pause_generation", responses=refused)
    async def pause(fields: PauseFields = _PAUSE) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(Pause(fields.mode))
        return _DONE

    @app.post("/continue_generation", responses=refused)
    async def go_on(fields: ContinueFields = _CONTINUE) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(Continue())
        return _DONE

    @app.get("/flush_cache", responses=refused)
    async def flush() -> dict[str, bool]:
        await rollouts.ask(ForgetKV())
        return _DONE

    @app.post("/flush_cache", responses=refused, include_in_schema=False)
    async def flush_too() -> dict[str, bool]:
        return await flush()

    @app.post("/update_weights_from_disk", responses=refused)
    async def update(fields: ReplaceFields) -> dict[str, Any]:
        refuse_unsupported(fields)
        version = await rollouts.replace(
            fields.model_path, fields.weight_version, is_aborting=fields.abort_all_requests
        )
        return {**_DONE, "message": f"the weights of {fields.model_path} are in force", "weight_version": version}

    @app.post("/release_memory_occupation", responses=refused)
    async def release(fields: TagFields = _ALL) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(ReleaseMemory(fields.tags))
        return _DONE

    @app.post("/resume_memory_occupation", responses=refused)
    async def resume(fields: TagFields = _ALL) -> dict[str, bool]:
        refuse_unsupported(fields)
        await rollouts.ask(ResumeMemory(fields.tags))
        return _DONE
