//! Certificates and keys in PEM: texts, or files that are read at each attempt to connect.

use std::{borrow::Cow, fmt, fs, path::PathBuf};

/// The certificates of TLS connections.
#[derive(Clone, Debug, Default)]
pub(crate) struct Certificates {
    /// The trusted authorities; `None`: those that the system trusts.
    pub(crate) root: Option<Pem>,
    /// The certificate of this client, and its private key.
    pub(crate) client: Option<(Pem, Pem)>,
}

#[derive(Clone)]
pub(crate) enum Pem {
    Text(Vec<u8>),
    File(PathBuf),
}

impl Certificates {
    pub(crate) fn is_empty(&self) -> bool {
        self.root.is_none() && self.client.is_none()
    }

    /// Returns whether they are in files.
    pub(crate) fn change(&self) -> bool {
        let own = self.client.iter().flat_map(|(own, key)| [own, key]);
        let mut all = self.root.iter().chain(own);
        all.any(|pem| matches!(pem, Pem::File(_)))
    }
}

impl Pem {
    /// Reads the file, if it is one. Returns a complaint if that is impossible.
    pub(crate) fn read(&self) -> Result<Cow<'_, [u8]>, String> {
        match self {
            Self::Text(text) => Ok(Cow::Borrowed(text)),
            Self::File(path) => fs::read(path)
                .map(Cow::Owned)
                .map_err(|error| format!("the file {path:?} cannot be read: {error}")),
        }
    }
}

/// Omits the text.
impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Text(..)"),
            Self::File(path) => path.fmt(f),
        }
    }
}
