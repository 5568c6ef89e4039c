//! Files that a child finds where it starts, and those that one has left for the next.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

/// Some files of a directory. Where a text among them names that directory, it names the new one in
/// a new one.
#[derive(Clone, Default)]
pub(crate) struct Files {
    from: PathBuf,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Files {
    /// Those of `names` that are there.
    pub(super) fn read_from(directory: &Path, names: &[&'static str]) -> Self {
        let files = names
            .iter()
            .filter_map(|name| Some((*name, fs::read(directory.join(name)).ok()?)));
        Self {
            from: directory.to_owned(),
            files: files.collect(),
        }
    }

    pub(crate) fn add(&mut self, name: &'static str, content: &[u8]) {
        self.files.push((name, content.to_owned()));
    }

    pub(crate) fn write_to(&self, directory: &Path) -> io::Result<()> {
        for (name, content) in &self.files {
            let file = directory.join(name);
            file.parent().map_or(Ok(()), fs::create_dir_all)?;
            match (
                std::str::from_utf8(content),
                self.from.to_str(),
                directory.to_str(),
            ) {
                (Ok(text), Some(from), Some(to)) if !from.is_empty() => {
                    fs::write(file, text.replace(from, to))?
                }
                _ => fs::write(file, content)?,
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.files.iter().map(|(name, _)| name))
            .finish()
    }
}
