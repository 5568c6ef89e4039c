//! The store of the guide, as a third party would write one, with a scheme of URLs.

#[path = "../../lock-runtime/guide/stores/files.rs"]
mod example;

use std::{fs, path::Path};

use lock_runtime::store::{RecordStore, StoreError, StoreErrorKind};

pub use self::example::FileRecords;

/// Opens the store at `files:///var/lib/locks`. Each namespace has a directory below this one.
///
/// # Errors
/// `InvalidUrl` if the URL names no directory.
pub fn open_files(url: &str, namespace: &str) -> Result<RecordStore, StoreError> {
    let is_scheme = |scheme: &&str| scheme.eq_ignore_ascii_case("files");
    let parts = url.split_once("://");
    let directory = parts.filter(|(scheme, _)| is_scheme(scheme));
    let directory = directory.map(|(_, path)| Path::new(path));
    let Some(directory) = directory.filter(|it| it.is_dir()) else {
        let message = "the URL names no directory: files:///var/lib/locks";
        return Err(StoreError::new(StoreErrorKind::InvalidUrl, message));
    };
    if namespace.contains('/') || matches!(namespace, "." | "..") {
        let message = format!("the namespace {namespace:?} is no name of a directory");
        return Err(StoreError::new(StoreErrorKind::Unsupported, message));
    }
    let directory = directory.join(namespace);
    fs::create_dir_all(&directory).map_err(|error| {
        StoreError::new(
            StoreErrorKind::Forbidden,
            format!("{}: {error}", directory.display()),
        )
    })?;
    Ok(RecordStore::new(FileRecords::new(directory)))
}
