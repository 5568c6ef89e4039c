//! Compiles and runs cases.
//!
//! cargo builds lock-runtime once, in a project of its own that never changes. rustc compiles the
//! cases, which always change. So the build of lock-runtime is unambiguous, nothing of the cases
//! stays in the target directory, and only the cases are compiled again.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::Value;
use tokio::{process::Command, time::timeout};

/// The time-out of a build or a run. It is enough for the first build on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// The directory and the rustc arguments for cases.
pub(super) struct Project {
    directory: tempfile::TempDir,
    rustc: Vec<OsString>,
    support: &'static str,
}

/// An error of the compiler.
#[derive(Clone, Debug)]
pub(super) struct Complaint {
    pub(super) code: Option<String>,
    pub(super) message: String,
    /// The primary spans, in bytes of the case's file.
    pub(super) places: Vec<std::ops::Range<usize>>,
    pub(super) rendered: String,
}

/// The outcome of a program of cases.
#[derive(Default)]
pub(super) struct Found {
    /// Cases that do not compile.
    pub(super) refused: BTreeMap<usize, Vec<Complaint>>,
    /// The output of the others: tags and texts.
    pub(super) printed: BTreeMap<usize, Vec<(char, String)>>,
}

/// A program of cases: with `format!`, or with the attribute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Program {
    Reference,
    Locked,
}

impl Project {
    pub(super) async fn new(support: &'static str) -> Self {
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("attribute-property");
        let mut rustc = libraries(&scratch).await;
        // The cases leave things unused on purpose.
        rustc.extend(
            ["--edition=2024", "--cap-lints=allow", "--error-format=json"].map(OsString::from),
        );
        Self {
            directory: tempfile::tempdir_in(&scratch).unwrap(),
            rustc,
            support,
        }
    }

    /// Compiles the files, leaves out those that are refused, and runs the others. Every file has a
    /// function `call_of_the_case`.
    pub(super) async fn run(&self, program: Program, files: &BTreeMap<usize, String>) -> Found {
        let directory = self.directory.path();
        fs::write(directory.join("support.rs"), self.support).unwrap();
        for (number, file) in files {
            fs::write(directory.join(file_name(*number)), file).unwrap();
        }
        let mut found = Found::default();
        loop {
            let left: BTreeSet<usize> = files
                .keys()
                .copied()
                .filter(|number| !found.refused.contains_key(number))
                .collect();
            if left.is_empty() {
                return found;
            }
            let complaints = self.compile(program, &left).await;
            if complaints.is_empty() {
                found.printed = self.printed(&left).await;
                return found;
            }
            found.refused.extend(complaints);
        }
    }

    async fn compile(
        &self,
        program: Program,
        cases: &BTreeSet<usize>,
    ) -> BTreeMap<usize, Vec<Complaint>> {
        let directory = self.directory.path();
        fs::write(directory.join("main.rs"), main(program, cases)).unwrap();
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc
            .args(&self.rustc)
            .args(["main.rs", "-o", "cases"])
            .current_dir(directory);
        if program == Program::Reference {
            rustc.args(["--cfg", "reference"]);
        }
        let output = ended(&mut rustc, &format!("rustc on {} cases", cases.len())).await;
        let mut complaints: BTreeMap<usize, Vec<Complaint>> = BTreeMap::new();
        let stderr = String::from_utf8_lossy(&output.stderr);
        for line in stderr.lines() {
            let Ok(diagnostic) = serde_json::from_str::<Value>(line) else {
                panic!("rustc printed a line that is no diagnostic:\n{stderr}");
            };
            let level = diagnostic["level"].as_str().unwrap_or_default();
            let spans = diagnostic["spans"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default();
            let message = diagnostic["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            // "aborting due to 3 previous errors", "for more information about this error"
            if !level.starts_with("error")
                || (spans.is_empty() && message.starts_with("aborting due to"))
            {
                continue;
            }
            let rendered = diagnostic["rendered"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            let primary = spans.iter().filter(|span| span["is_primary"] == true);
            let places: Vec<_> = primary.filter_map(place).collect();
            let [(case, _), ..] = places[..] else {
                panic!("an error outside of the cases:\n{rendered}")
            };
            complaints.entry(case).or_default().push(Complaint {
                code: diagnostic["code"]["code"].as_str().map(String::from),
                message,
                places: places.into_iter().map(|(_, place)| place).collect(),
                rendered,
            });
        }
        assert_eq!(
            output.status.success(),
            complaints.is_empty(),
            "rustc: {}\n{stderr}",
            output.status
        );
        complaints
    }

    async fn printed(&self, cases: &BTreeSet<usize>) -> BTreeMap<usize, Vec<(char, String)>> {
        let mut command = Command::new(self.directory.path().join("cases"));
        let output = ended(&mut command, &format!("a program of {} cases", cases.len())).await;
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        let last = stdout.lines().last().unwrap_or_default();
        assert!(
            output.status.success(),
            "{}, after {last}:\n{stderr}",
            output.status
        );
        let lines = stdout
            .lines()
            .filter_map(|line| line.strip_prefix("< case_"));
        lines
            .map(|line| {
                let mut words = line.split(' ');
                let case = words
                    .next()
                    .and_then(|number| number.parse().ok())
                    .unwrap_or_else(|| panic!("{line}"));
                let fields = words.map(|word| {
                    let (tag, hex) = word.split_at(1);
                    let bytes = (0..hex.len() / 2)
                        .map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
                    (
                        tag.chars().next().unwrap_or_default(),
                        String::from_utf8(bytes.collect()).unwrap(),
                    )
                });
                (case, fields.collect())
            })
            .collect()
    }
}

fn file_name(case: usize) -> String {
    format!("case_{case}.rs")
}

fn main(program: Program, cases: &BTreeSet<usize>) -> String {
    let modules: String = cases
        .iter()
        .map(|case| format!("mod case_{case};\n"))
        .collect();
    let calls = cases.iter().map(|case| {
        let keys = if program == Program::Locked {
            format!("case_{case}::KEYS, ")
        } else {
            String::new()
        };
        format!("        (\"case_{case}\", {keys}case_{case}::call_of_the_case),\n")
    });
    format!(
        "mod support;\n{modules}\nfn main() {{\n    support::run(&[\n{}    ]);\n}}\n",
        calls.collect::<String>()
    )
}

/// The case that contains a span, and its range there. A span in a macro of another file counts as
/// the call of that macro.
fn place(span: &Value) -> Option<(usize, std::ops::Range<usize>)> {
    let file = span["file_name"].as_str()?;
    let case = file
        .strip_prefix("case_")
        .and_then(|rest| rest.strip_suffix(".rs"));
    match case.and_then(|number| number.parse().ok()) {
        Some(case) => {
            let byte = |name: &str| {
                span[name]
                    .as_u64()
                    .and_then(|byte| usize::try_from(byte).ok())
            };
            Some((case, byte("byte_start")?..byte("byte_end")?))
        }
        None => place(&span["expansion"]["span"]),
    }
}

/// Builds lock-runtime and tokio, and returns the rustc arguments with their paths.
async fn libraries(scratch: &Path) -> Vec<OsString> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let project = scratch.join("libraries");
    fs::create_dir_all(project.join("src")).unwrap();
    let runtime = root.join("lock-runtime");
    let manifest = format!(
        "[package]\nname = \"libraries\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [profile.dev]\ndebug = 0\nincremental = false\n\n[dependencies]\n\
         lock-runtime = {{ path = {runtime:?}, default-features = false, features = [\"macros\"] }}\n\
         tokio = {{ version = \"1\", features = [\"rt\", \"time\"] }}\n"
    );
    // The versions of the workspace, which are available offline.
    fs::copy(root.join("Cargo.lock"), project.join("Cargo.lock")).unwrap();
    for (file, text) in [("Cargo.toml", manifest.as_str()), ("src/lib.rs", "")] {
        fs::write(project.join(file), text).unwrap();
    }
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo
        .args(["build", "--offline", "--message-format=json"])
        .current_dir(&project);
    cargo.env("CARGO_TARGET_DIR", scratch.join("target"));
    // The cases are compiled without these flags, and some of them, such as coverage, have to be
    // the same for all crates.
    cargo
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    let output = ended(&mut cargo, "the build of lock-runtime").await;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    let mut directories = BTreeSet::new();
    let mut arguments: Vec<OsString> = Vec::new();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let messages = stdout
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    for message in messages.filter(|message| message["reason"] == "compiler-artifact") {
        let files = message["filenames"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .map(PathBuf::from);
        for file in files {
            directories.extend(file.parent().map(Path::to_owned));
            let name = message["target"]["name"].as_str().unwrap_or_default();
            if matches!(name, "lock_runtime" | "tokio")
                && file
                    .extension()
                    .is_some_and(|extension| extension == "rlib")
            {
                let mut found = OsString::from(format!("{name}="));
                found.push(file);
                arguments.extend(["--extern".into(), found]);
            }
        }
    }
    assert_eq!(arguments.len(), 4, "{stdout}");
    for directory in directories {
        let mut dependencies = OsString::from("dependency=");
        dependencies.push(directory);
        arguments.extend(["-L".into(), dependencies]);
    }
    arguments
}

async fn ended(command: &mut Command, what: &str) -> Output {
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    match timeout(LIMIT, output).await {
        Ok(output) => output.unwrap_or_else(|error| panic!("{what}: {error}")),
        Err(_) => panic!("{what} has not ended after {LIMIT:?}"),
    }
}
