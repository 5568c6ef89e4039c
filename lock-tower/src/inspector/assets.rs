//! The script and the style sheet of the pages.

use http::Uri;

/// A file that the pages refer to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asset {
    Script,
    Style,
}

impl Asset {
    pub(super) const SCRIPT: &str = concat!("?asset=script&v=", env!("CARGO_PKG_VERSION"));
    pub(super) const STYLE: &str = concat!("?asset=style&v=", env!("CARGO_PKG_VERSION"));

    pub(super) fn requested(uri: &Uri) -> Option<Self> {
        let query = uri.query()?;
        [(Self::Script, Self::SCRIPT), (Self::Style, Self::STYLE)]
            .into_iter()
            .find(|(_, link)| &link[1..] == query)
            .map(|(asset, _)| asset)
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Script => "text/javascript; charset=utf-8",
            Self::Style => "text/css; charset=utf-8",
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Script => include_str!("script.js"),
            Self::Style => include_str!("style.css"),
        }
    }
}
