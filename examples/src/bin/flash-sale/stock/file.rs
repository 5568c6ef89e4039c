//! A stock in files of this machine, for stores that keep locks and nothing else.

use std::{env, fs, io, path::PathBuf};

use anyhow::Context;

/// A stock in a directory of this run, with a file for each item.
#[derive(Clone)]
pub(crate) struct FileStock {
    directory: PathBuf,
    pub(super) url: String,
    pub(super) run: String,
}

impl FileStock {
    pub(super) fn new(url: &str, run: &str) -> Self {
        Self {
            directory: env::temp_dir().join(run),
            url: url.to_owned(),
            run: run.to_owned(),
        }
    }

    pub(super) fn create(&self) -> anyhow::Result<()> {
        let created = fs::create_dir(&self.directory);
        created.with_context(|| format!("cannot keep the stock in {}", self.directory.display()))
    }

    pub(super) fn left(&self, item: &str) -> anyhow::Result<Option<u64>> {
        match fs::read_to_string(self.directory.join(item)) {
            Ok(left) => Ok(Some(left.parse()?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Replaces the file: a reader without the lock finds an earlier number, never a part of one.
    pub(super) fn write(&self, item: &str, left: u64) -> anyhow::Result<()> {
        let written = self
            .directory
            .join(format!(".{item}-{:x}", rand::random::<u64>()));
        fs::write(&written, left.to_string())?;
        Ok(fs::rename(written, self.directory.join(item))?)
    }

    pub(super) fn clear(&self) -> anyhow::Result<()> {
        Ok(fs::remove_dir_all(&self.directory)?)
    }
}
