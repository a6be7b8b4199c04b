"""The table of all routes: those of the Hub, and those of the storage it sends the client to."""

from __future__ import annotations

from ..routing import Route
from . import accounts, lfs, pulls, read, resolve, write

HUB_ROUTES = (
    Route("whoami", "GET", "/api/whoami-v2", accounts.whoami),
    Route("validate_yaml", "POST", "/api/validate-yaml", accounts.validate_yaml),
    Route("create_repo", "POST", "/api/repos/create", accounts.create_repository),
    Route("delete_repo", "DELETE", "/api/repos/delete", accounts.delete_repository),
    Route("settings", "PUT", "/api/{kind}/{id}/settings", accounts.change_settings),
    Route("list", "GET", "/api/{kind}", read.list_repositories),
    Route("info", "GET", "/api/{kind}/{id}", read.info),
    Route("info", "GET", "/api/{kind}/{id}/revision/{revision}", read.info),
    Route("tree", "GET", "/api/{kind}/{id}/tree/{revision}", read.tree),
    Route("tree", "GET", "/api/{kind}/{id}/tree/{revision}/{path}", read.tree),
    Route("paths_info", "POST", "/api/{kind}/{id}/paths-info/{revision}", read.paths_info),
    Route("refs", "GET", "/api/{kind}/{id}/refs", read.refs),
    Route("commits", "GET", "/api/{kind}/{id}/commits/{revision}", read.commits),
    Route("auth_check", "GET", "/api/{kind}/{id}/auth-check", read.check_access),
    Route("preupload", "POST", "/api/{kind}/{id}/preupload/{revision}", write.preupload),
    Route("commit", "POST", "/api/{kind}/{id}/commit/{revision}", write.commit),
    Route("branch", "POST", "/api/{kind}/{id}/branch/{name}", write.create_branch),
    Route("branch", "DELETE", "/api/{kind}/{id}/branch/{name}", write.delete_branch),
    Route("tag", "POST", "/api/{kind}/{id}/tag/{name}", write.create_tag),
    Route("tag", "DELETE", "/api/{kind}/{id}/tag/{name}", write.delete_tag),
    Route("pulls", "GET", "/api/{kind}/{id}/discussions", pulls.list_pulls),
    Route("pulls", "POST", "/api/{kind}/{id}/discussions", pulls.open_pull),
    Route("pull", "GET", "/api/{kind}/{id}/discussions/{number}", pulls.pull_details),
    Route("merge", "POST", "/api/{kind}/{id}/discussions/{number}/merge", pulls.merge),
    Route("lfs_batch", "POST", "/{prefix}{id}.git/info/lfs/objects/batch", lfs.batch),
    Route("lfs_verify", "POST", "/{prefix}{id}.git/info/lfs/objects/verify", lfs.verify),
    Route("lfs_complete", "POST", "/api/complete_multipart/{kind}/{id}/{digest}", lfs.complete),
    Route("resolve", "GET HEAD", "/{prefix}{id}/resolve/{revision}/{path}", resolve.resolve),
)

STORAGE_ROUTES = (
    Route("upload", "PUT", "/{kind}/{id}/lfs/{digest}", lfs.upload),
    Route("upload_part", "PUT", "/{kind}/{id}/lfs/{digest}/parts/{number}", lfs.upload_part),
    Route("download", "GET HEAD", "/{kind}/{id}/lfs/{digest}", lfs.download),
)
