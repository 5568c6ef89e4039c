//! What is wrong with a policy file, all of it at once, each with its place.

use std::{
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

/// Why policies were not loaded. It displays a line for each mistake.
#[derive(Debug)]
pub struct PolicyError {
    file: Option<PathBuf>,
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    Unreadable(io::Error),
    Mistakes(Vec<Mistake>),
    NoFile,
}

/// Something that is wrong with a policy file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mistake {
    /// The line, from 1.
    pub line: usize,
    /// The column, in characters from 1.
    pub column: usize,
    /// What is wrong, and what to write instead.
    pub message: String,
}

impl PolicyError {
    pub(super) fn unreadable(error: io::Error) -> Self {
        Self { file: None, cause: Cause::Unreadable(error) }
    }

    pub(super) fn mistakes(mistakes: Vec<Mistake>) -> Self {
        Self { file: None, cause: Cause::Mistakes(mistakes) }
    }

    pub(super) fn no_file() -> Self {
        Self { file: None, cause: Cause::NoFile }
    }

    pub(super) fn of_file(self, file: &Path) -> Self {
        Self { file: Some(file.into()), ..self }
    }

    /// Every mistake, in the order of the text. None if it could not be read at all.
    pub fn all(&self) -> &[Mistake] {
        match &self.cause {
            Cause::Mistakes(mistakes) => mistakes,
            Cause::Unreadable(_) | Cause::NoFile => &[],
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.cause, &self.file) {
            (Cause::NoFile, _) => f.write_str("the policies were not read from a file; `replace` them instead"),
            (Cause::Unreadable(error), None) => write!(f, "the policies cannot be read: {error}"),
            (Cause::Unreadable(error), Some(file)) => write!(f, "{}: {error}", file.display()),
            (Cause::Mistakes(mistakes), file) => {
                for (index, Mistake { line, column, message }) in mistakes.iter().enumerate() {
                    if index > 0 {
                        f.write_str("\n")?;
                    }
                    match file {
                        // As compilers do, so that editors and terminals find the place.
                        Some(file) => write!(f, "{}:{line}:{column}: {message}", file.display())?,
                        None => write!(f, "line {line}, column {column}: {message}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

impl Error for PolicyError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.cause {
            Cause::Unreadable(error) => Some(error),
            Cause::Mistakes(_) | Cause::NoFile => None,
        }
    }
}

/// The mistakes found so far in a text.
pub(super) struct Mistakes<'t> {
    text: &'t str,
    found: Vec<(usize, String)>,
    /// Lines that are no TOML, of which nothing else is worth saying.
    broken: Vec<usize>,
}

impl<'t> Mistakes<'t> {
    /// Of a text that is TOML but for `errors`.
    pub(super) fn of(text: &'t str, errors: &[toml::de::Error]) -> Self {
        let mut mistakes = Self { text, found: Vec::new(), broken: Vec::new() };
        for error in errors {
            let at = error.span().map_or(0, |span| span.start);
            mistakes.add(at, error.message());
            mistakes.broken.push(mistakes.place(at).0);
        }
        mistakes
    }

    /// One more, `at` so many bytes from the start of the text.
    pub(super) fn add(&mut self, at: usize, message: impl Into<String>) {
        if !self.broken.contains(&self.place(at).0) {
            self.found.push((at, message.into()));
        }
    }

    pub(super) fn text(&self) -> &'t str {
        self.text
    }

    /// Line and column of a byte.
    pub(super) fn place(&self, at: usize) -> (usize, usize) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.rfind('\n').map_or(0, |newline| newline + 1);
        (before.matches('\n').count() + 1, before[line..].chars().count() + 1)
    }

    /// `Ok` if there are none.
    pub(super) fn into_result(mut self) -> Result<(), PolicyError> {
        if self.found.is_empty() {
            return Ok(());
        }
        self.found.sort();
        self.found.dedup();
        let places: Vec<_> = self.found.iter().map(|(at, _)| self.place(*at)).collect();
        let mistakes = self.found.into_iter().zip(places);
        Err(PolicyError::mistakes(
            mistakes.map(|((_, message), (line, column))| Mistake { line, column, message }).collect(),
        ))
    }
}
