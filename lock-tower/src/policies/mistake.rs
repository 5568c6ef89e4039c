//! Errors of policy files: all mistakes at once, each with its position.

use std::{
    collections::HashSet,
    error::Error,
    fmt, io,
    path::{Path, PathBuf},
};

use lock_runtime::text;

/// Error of loading policies. Its `Display` output has one line for each mistake. `Debug` prints
/// the same.
pub struct PolicyError {
    file: Option<PathBuf>,
    cause: Cause,
}

enum Cause {
    Unreadable(io::Error),
    Mistakes(Vec<PolicyMistake>),
    NoFile,
}

/// A mistake in a policy file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PolicyMistake {
    /// The line, starting at 1.
    pub line: usize,
    /// The column in characters, starting at 1.
    pub column: usize,
    /// A description of the mistake, and of the correct form.
    pub message: String,
}

impl PolicyError {
    pub(super) fn unreadable(error: io::Error) -> Self {
        Self {
            file: None,
            cause: Cause::Unreadable(error),
        }
    }

    pub(super) fn mistakes(mistakes: Vec<PolicyMistake>) -> Self {
        Self {
            file: None,
            cause: Cause::Mistakes(mistakes),
        }
    }

    pub(super) fn no_file() -> Self {
        Self {
            file: None,
            cause: Cause::NoFile,
        }
    }

    pub(super) fn of_file(self, file: &Path) -> Self {
        Self {
            file: Some(file.into()),
            ..self
        }
    }

    /// Returns all mistakes in the order of the text. Empty if the text could not be read at all.
    pub fn all(&self) -> &[PolicyMistake] {
        match &self.cause {
            Cause::Mistakes(mistakes) => mistakes,
            Cause::Unreadable(_) | Cause::NoFile => &[],
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.cause, &self.file) {
            (Cause::NoFile, _) => {
                f.write_str("the policies were not read from a file; `replace` them instead")
            }
            (Cause::Unreadable(error), None) => write!(f, "cannot read policies: {error}"),
            (Cause::Unreadable(error), Some(file)) => {
                write!(f, "cannot read policies from {}: {error}", file.display())
            }
            (Cause::Mistakes(mistakes), file) => {
                for (
                    index,
                    PolicyMistake {
                        line,
                        column,
                        message,
                    },
                ) in mistakes.iter().enumerate()
                {
                    if index > 0 {
                        f.write_str("\n")?;
                    }
                    match file {
                        // The format of compilers, which editors and terminals recognize.
                        Some(file) => write!(f, "{}:{line}:{column}: {message}", file.display())?,
                        None => write!(f, "line {line}, column {column}: {message}")?,
                    }
                }
                Ok(())
            }
        }
    }
}

impl fmt::Debug for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyError({self})")
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
    /// The offsets of the second line and those after it.
    lines: Vec<usize>,
    found: Vec<(usize, String)>,
    /// Lines with a TOML syntax error. Other mistakes in them are not reported.
    broken: HashSet<usize>,
}

impl<'t> Mistakes<'t> {
    /// Creates the collection with the TOML syntax errors of a text.
    pub(super) fn of(text: &'t str, errors: &[toml::de::Error]) -> Self {
        let lines = text.match_indices('\n').map(|(at, _)| at + 1).collect();
        let mut mistakes = Self {
            text,
            lines,
            found: Vec::new(),
            broken: HashSet::new(),
        };
        // The end of the table whose heading is a duplicate: its keys may be duplicates, too.
        let mut duplicate = 0;
        for error in errors {
            let at = error.span().map_or(0, |span| span.start);
            let line = mistakes.line_of(at).trim_start();
            let mut message = error.message().to_owned();
            if line.starts_with("[routes.") && !line.contains(['"', '\'']) {
                message += ": write a route in quotes, [routes.\"POST /orders/{id}\"]";
            } else if message.starts_with("duplicate key") {
                if at < duplicate {
                    mistakes.broken.insert(mistakes.line(at));
                    continue;
                }
                if line.starts_with('[') {
                    let after = text.get(at..).and_then(|text| text.find("\n["));
                    duplicate = after.map_or(text.len(), |after| at + after);
                }
                message += ": leave one of them out";
            } else if message.starts_with("string values must be quoted")
                && let Some(quoted) = mistakes.quoted(at)
            {
                message = format!("string values must be quoted: write {quoted}");
            }
            mistakes.add(at, format!("TOML syntax error, {message}"));
            mistakes.broken.insert(mistakes.line(at));
        }
        mistakes
    }

    /// Returns the field whose value begins at an offset, with quotes around the value.
    fn quoted(&self, at: usize) -> Option<String> {
        let before = self.text.get(self.begin_of(self.line(at))..at)?;
        let name = before.trim_end().strip_suffix('=')?.trim_end();
        let name = name.rsplit([' ', '\t', ',', '{']).next()?;
        let value = self.text.get(at..)?.split([',', '}', '#', '\n']).next()?;
        let value = value.trim();
        let bare = |text: &str| !text.is_empty() && !text.contains(['"', '\'', '\\']);
        (bare(name) && bare(value)).then(|| format!("{name} = \"{value}\""))
    }

    /// Adds a mistake. `at` is its offset from the start of the text, in bytes.
    pub(super) fn add(&mut self, at: usize, message: impl Into<String>) {
        if self.broken.contains(&self.line(at)) {
            return;
        }
        // Quoted parts of the text must not break the line.
        let message = message.into().replace(char::is_control, " ");
        self.found.push((at, text::message(message).into_owned()));
    }

    /// Adds a mistake about something that is missing. It is ignored if parts of the text could
    /// not be parsed, because it may be there.
    pub(super) fn add_missing(&mut self, at: usize, message: impl Into<String>) {
        if self.broken.is_empty() {
            self.add(at, message);
        }
    }

    pub(super) fn text(&self) -> &'t str {
        self.text
    }

    /// Returns the line of an offset, starting at 1.
    pub(super) fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|begin| *begin <= at) + 1
    }

    fn line_of(&self, at: usize) -> &'t str {
        let begin = self.begin_of(self.line(at));
        self.text[begin..].split('\n').next().unwrap_or_default()
    }

    /// Returns the offset of the start of a line.
    fn begin_of(&self, line: usize) -> usize {
        line.checked_sub(2).map_or(0, |before| self.lines[before])
    }

    /// Returns the line and the column of an offset.
    fn place(&self, at: usize) -> (usize, usize) {
        let line = self.line(at);
        let begin = self.begin_of(line);
        let column = self.text[begin..]
            .char_indices()
            .take_while(|(from, _)| begin + from < at)
            .count();
        (line, column + 1)
    }

    /// Returns the mistakes as an error, or `Ok` if there are none.
    pub(super) fn into_result(mut self) -> Result<(), PolicyError> {
        if self.found.is_empty() {
            return Ok(());
        }
        self.found.sort();
        self.found.dedup();
        let places: Vec<_> = self.found.iter().map(|(at, _)| self.place(*at)).collect();
        let mistakes = self.found.into_iter().zip(places);
        Err(PolicyError::mistakes(
            mistakes
                .map(|((_, message), (line, column))| PolicyMistake {
                    line,
                    column,
                    message,
                })
                .collect(),
        ))
    }
}
