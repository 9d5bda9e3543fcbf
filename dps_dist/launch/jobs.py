"""Ray Jobs: hand a command to a cluster, follow it, and end as it ended. What `dps submit` does."""

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import requests
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from dps_dist import recipes
from dps_dist.config import KD
from dps_dist.errors import InputError, LostError
from dps_dist.launch import tokens
from dps_dist.recipes import files
from dps_dist.recipes.compose import own_files

# Ray leaves out what .gitignore names; these are large wherever they are
EXCLUDED = (".git", ".venv", "*.beton", "runs", "sweeps", "mlruns", "wandb", "__pycache__")
STOPPED = 143  # as a process that was asked to end
ANSWER_S = 10.0
ASK_S = 0.5
PATIENCE_S = 60.0  # with a connection that is lost
UNANSWERED = (RuntimeError, requests.RequestException, ConnectionError, RayError)


def entrypoint(
    recipe: str | None,
    settings: Sequence[str],
    options: Sequence[str],
    out: str,
    working_dir: Path,
) -> str:
    """The job's command; refused where it would write or read what ends with the job."""
    if "://" not in out and not Path(out).is_absolute():
        raise InputError(
            f"--out is {out}: a job's working directory goes with it; give an absolute path that "
            "all nodes see, or a URL such as s3://bucket/runs"
        )
    if recipe is not None:
        config = recipes.load(recipe, settings)
        if not Path(config.data.path).is_absolute():
            raise InputError(
                f"data.path is {config.data.path}: data do not travel with a job; prepare them "
                "where all nodes see them and give that path, as in --set data.path=/data/imagenet"
            )
        teachers = config.method.teachers if isinstance(config.method, KD) else ()
        for folder in teachers:
            if "://" not in folder and not Path(folder).is_absolute():
                raise InputError(
                    f"method.teachers holds {folder}: runs do not travel with a job; give absolute "
                    "paths that all nodes see, or URLs such as s3://bucket/runs/a"
                )
        if files.is_path(recipe):
            recipe, *_ = [_traveling(file, working_dir) for file in own_files(recipe)]
    sets = [word for one in settings for word in ("--set", one)]
    return shlex.join(["dps", "train", *([recipe] if recipe else []), *sets, *options])


def _traveling(file: Path, working_dir: Path) -> str:
    """A recipe's path in the working directory, which is where the job finds it."""
    there = file.parent.resolve() / file.name  # if it is a link, what it leads to goes with the job
    if not there.is_relative_to(working_dir.resolve()):
        raise InputError(f"{file} is outside of --working-dir, {working_dir}: move it in")
    inside = there.relative_to(working_dir.resolve())
    if left_out := set(inside.parts) & set(EXCLUDED):
        raise InputError(
            f"{file} does not travel with a job, as it is in {left_out.pop()}: copy it elsewhere"
        )
    return str(inside)


def client(address: str, token: str | None) -> JobSubmissionClient:
    """Of the cluster's dashboard, which is where jobs are handed in."""
    if not address.startswith(("http://", "https://")):
        raise InputError(f"--address is {address}: give the dashboard's, such as http://head:8265")
    try:
        requests.get(f"{address}/api/version", timeout=ANSWER_S)  # Ray would try for minutes
        headers = {"Authorization": f"Bearer {token}"} if token else None
        return JobSubmissionClient(address, headers=headers)
    except AuthenticationError as error:
        raise _refused(address, error) from None
    except (requests.RequestException, ConnectionError, RuntimeError) as error:
        raise InputError(
            f"--address is {address}: no Ray dashboard answers there ({type(error).__name__}); "
            "start the cluster, or forward the port 8265 of its head"
        ) from None


def _refused(address: str, error: AuthenticationError) -> InputError:
    wrong = "failed" in error.message.splitlines()[0]
    why = "the token is wrong" if wrong else "it wants a token"
    return InputError(
        f"the Ray cluster at {address} refuses, {why}: {tokens.REMEDY}, or with --token-file"
    )


def submit(to: JobSubmissionClient, command: str, working_dir: Path, exclude: Sequence[str]) -> str:
    """Upload the working directory without data; the job's id."""
    if not working_dir.is_dir():
        raise InputError(f"--working-dir is {working_dir}: there is no such folder")
    environment = {"working_dir": str(working_dir), "excludes": [*EXCLUDED, *exclude]}
    try:
        job: str = to.submit_job(entrypoint=command, runtime_env=environment)
    except AuthenticationError as error:
        raise _refused(to.get_address(), error) from None
    except (RuntimeError, ValueError) as error:
        last = str(error).strip().splitlines()[-1]
        raise InputError(f"the cluster did not take the job: {last[:300]}") from None
    return job


def follow(to: JobSubmissionClient, job: str, say: Callable[[str], None]) -> int:
    """Its log as it comes; the exit code that it ended with."""
    said = 0

    async def read() -> None:
        nonlocal said
        seen = 0  # a tail begins at the log's beginning
        async for text in to.tail_job_logs(job):
            seen += len(text)
            say(text[max(0, len(text) - (seen - said)) :] if seen > said else "")
            said = max(said, seen)

    while not (info := _info(to, job)).status.is_terminal():
        with suppress(RuntimeError, aiohttp.ClientError):  # the connection is lost, not the job
            asyncio.run(read())
        time.sleep(ASK_S)
    with suppress(*UNANSWERED):  # as where the job's node is gone, and its log with it
        say(to.get_job_logs(job)[said:])  # what came while the connection was lost
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        return STOPPED
    return info.driver_exit_code or 1


def _info(to: JobSubmissionClient, job: str) -> JobDetails:
    """Asked again while nobody answers: the job goes on without us."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return to.get_job_info(job)
        except UNANSWERED as error:
            if time.monotonic() > until:
                raise LostError(
                    f"{to.get_address()} no longer answers ({type(error).__name__}), while {job} "
                    f"goes on: `ray job status --address {to.get_address()} {job}` says how it ends"
                ) from None
            time.sleep(ASK_S)
