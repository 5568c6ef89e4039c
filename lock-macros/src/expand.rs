//! The expansion: the function as it was written, with its body behind a lock.
//!
//! Only attributes, visibility and signature are parsed. The body stays a run of tokens, so that code which is still being
//! typed does not break the attribute, and it stands in the output once.

use std::time::Duration;

use proc_macro2::{Delimiter, Group, Span, TokenStream};
use quote::{ToTokens as _, quote, quote_spanned};
use syn::{
    Attribute, Ident, ReturnType, Signature, Token, Type, Visibility,
    ext::IdentExt as _,
    parse::{Parse, ParseStream},
    spanned::Spanned as _,
    token::Brace,
    visit_mut::{VisitMut, visit_type_mut},
};

use crate::args::{Args, Mode, Value, Wait, located_at};

/// The locked function; on any mistake the item as it was, beside the errors.
pub(crate) fn expand(args: TokenStream, item: TokenStream) -> TokenStream {
    let error = match (syn::parse2::<Function>(item.clone()), syn::parse2::<Args>(args)) {
        (Ok(function), Ok(args)) => return function.locked(&args),
        (Err(mut error), Err(more)) => {
            error.combine(more);
            error
        }
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => error,
    };
    // Without the item every use of it would be one more error, and an editor would not know it any longer.
    let error = error.into_compile_error();
    quote!(#item #error)
}

/// An `async fn` whose body nobody has looked into.
struct Function {
    attrs: Vec<Attribute>,
    vis: Visibility,
    sig: Signature,
    brace: Brace,
    inner_attrs: Vec<Attribute>,
    body: TokenStream,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let attrs = input.call(Attribute::parse_outer)?;
        let vis = input.parse()?;
        if !begins_a_function(input) {
            return Err(input.error("`#[distributed_lock]` goes on an `async fn`: put it on a function or a method"));
        }
        let sig = input.parse()?;
        check(&sig)?;
        if input.peek(Token![;]) {
            return Err(
                input.error("there is no body here to lock: put `#[distributed_lock]` on the method that has it")
            );
        }
        let content;
        let brace = syn::braced!(content in input);
        Ok(Self { attrs, vis, sig, brace, inner_attrs: content.call(Attribute::parse_inner)?, body: content.parse()? })
    }
}

/// Is there an `fn` ahead, with nothing before it but `const`, `async`, `unsafe`, `extern "C"`?
fn begins_a_function(input: ParseStream<'_>) -> bool {
    let ahead = input.fork();
    while ahead.peek(Ident::peek_any) || ahead.peek(syn::LitStr) {
        if ahead.peek(Token![fn]) {
            return true;
        }
        if ahead.parse::<proc_macro2::TokenTree>().is_err() {
            break;
        }
    }
    false
}

/// Refuses functions that cannot wait for a lock, or cannot say that they did not get it.
fn check(sig: &Signature) -> syn::Result<()> {
    if let Some(constness) = &sig.constness {
        return Err(syn::Error::new(constness.span, "a `const fn` cannot wait for a lock: make it an `async fn`"));
    }
    if sig.asyncness.is_none() {
        let name = &sig.ident;
        let message = if returns_boxed_future(sig) {
            format!(
                "`{name}` is no `async fn` (`#[async_trait]` turns its methods into plain ones): put the work into an \
                 `async fn` of its own with `#[distributed_lock]` on it, and call that one from here"
            )
        } else {
            format!("waiting for a lock is asynchronous: write `async fn {name}`")
        };
        return Err(syn::Error::new(sig.fn_token.span, message));
    }
    if let ReturnType::Type(_, ty) = &sig.output
        && let Type::Never(_) = **ty
    {
        let message = "a function that never returns cannot report that the lock was lost: return a `Result` with \
                       `std::convert::Infallible` in its `Ok`";
        return Err(syn::Error::new(ty.span(), message));
    }
    Ok(())
}

/// `Pin<Box<dyn Future<..>>>`, by its words alone: an alias or a path changes nothing about the advice.
fn returns_boxed_future(sig: &Signature) -> bool {
    let ReturnType::Type(_, ty) = &sig.output else { return false };
    let words = ty.to_token_stream().to_string();
    words.contains("Box") && words.contains("Future")
}

impl Function {
    fn locked(self, args: &Args) -> TokenStream {
        // Whoever renames lock-runtime cannot use the attribute yet; all paths of the expansion start here.
        let span = Span::mixed_site();
        let rt = quote_spanned!(span=> ::lock_runtime::__rt);
        let Self { attrs, vis, sig, brace, inner_attrs, body } = self;

        let client = match &args.client {
            None => quote_spanned!(span=> #rt::ambient()),
            Some(client) => {
                let span = located_at(client.span());
                quote_spanned!(span=> #rt::client(&(#client)))
            }
        };
        let key = args.key.expand(&rt);
        let spec = spec(args, &rt);
        let anchor = return_type_anchor(&sig);
        let refused = {
            let span = located_at(output_span(&sig));
            quote_spanned!(span=> #rt::FromLockError::from_lock_error(__error))
        };
        // The user's line, but not the user's braces: the compiler would call them unnecessary.
        let mut block = Group::new(Delimiter::Brace, body);
        block.set_span(located_at(brace.span.join()));

        // Client, key and spec are done with before the body captures its variables: `client = self.locks` borrows from
        // what the body may move. The body is not handed to an async function, whose future would hold it twice.
        let mut outer = TokenStream::new();
        brace.surround(&mut outer, |outer| {
            outer.extend(quote_spanned! {span=>
                #(#inner_attrs)*
                let __client = #client;
                let __key = #key;
                let __spec = #spec;
                let __outcome = match #rt::enter(__client, __key, __spec).await {
                    ::core::result::Result::Ok(__entered) => {
                        __entered.cancel_on_loss(async move { #anchor #block }).await
                    }
                    ::core::result::Result::Err(__error) => ::core::result::Result::Err(__error),
                };
                match __outcome {
                    ::core::result::Result::Ok(__returned) => __returned,
                    ::core::result::Result::Err(__error) => #refused,
                }
            });
        });
        quote!(#(#attrs)* #vis #sig #outer)
    }
}

/// Where to show what is wrong with the return type.
fn output_span(sig: &Signature) -> Span {
    match &sig.output {
        ReturnType::Default => sig.ident.span(),
        ReturnType::Type(_, ty) => ty.span(),
    }
}

/// A reference to the spec, to a constant if it can be one.
fn spec(args: &Args, rt: &TokenStream) -> TokenStream {
    let span = Span::mixed_site();
    let mut constant = true;
    let mut spec = match &args.mode {
        Mode::Exclusive => quote_spanned!(span=> #rt::LockSpec::exclusive()),
        Mode::Shared => quote_spanned!(span=> #rt::LockSpec::shared()),
        Mode::Permits(permits) => {
            let permits = match permits {
                // n as 1 + (n - 1): no `unwrap` in code that is not ours.
                Value::Literal(permits) => {
                    let more = permits.get() - 1;
                    quote_spanned!(span=> ::core::num::NonZeroU32::MIN.saturating_add(#more))
                }
                Value::Expr(expr) => {
                    constant = false;
                    quote!(#expr)
                }
            };
            quote_spanned!(span=> #rt::LockSpec::permits(#permits))
        }
    };
    let mut set = |setter: &str, value: Option<&Value<Duration>>| {
        let setter = Ident::new(setter, span);
        let value = match value {
            None => TokenStream::new(),
            Some(Value::Literal(duration)) => {
                let (secs, nanos) = (duration.as_secs(), duration.subsec_nanos());
                quote_spanned!(span=> ::core::time::Duration::new(#secs, #nanos))
            }
            Some(Value::Expr(expr)) => {
                constant = false;
                quote!(#expr)
            }
        };
        spec.extend(quote_spanned!(span=> .#setter(#value)));
    };
    if let Some(lease) = &args.lease {
        set("lease", Some(lease));
    }
    match &args.wait {
        None => {}
        Some(Wait::No) => set("no_wait", None),
        Some(Wait::AtMost(wait)) => set("wait", Some(wait)),
    }
    if args.reentrant {
        set("reentrant", None);
    }
    if let Some(min_hold) = &args.min_hold {
        set("min_hold", Some(min_hold));
    }
    if let Some(max_hold) = &args.max_hold {
        set("max_hold", Some(max_hold));
    }
    // Eight bytes instead of a spec in the future, and no name that the body could see.
    if constant { quote_spanned!(span=> const { &#spec }) } else { quote_spanned!(span=> &#spec) }
}

/// A `return` that never runs: the first one that the compiler sees, so that the body is held to the declared type and
/// its errors stand where they stand without the attribute.
fn return_type_anchor(sig: &Signature) -> TokenStream {
    let span = located_at(output_span(sig));
    let mut ty = match &sig.output {
        ReturnType::Default => syn::parse_quote_spanned!(span=> ()),
        ReturnType::Type(_, ty) => (**ty).clone(),
    };
    InferImplTrait.visit_type_mut(&mut ty);
    quote_spanned! {span=>
        #[allow(
            unreachable_code,
            clippy::diverging_sub_expression,
            clippy::empty_loop,
            clippy::let_unit_value,
            clippy::let_with_type_underscore,
            clippy::needless_return,
        )]
        if false {
            let __returned: #ty = loop {};
            return __returned;
        }
    }
}

/// `impl Trait` stands in no `let`; `_` leaves it to the body.
struct InferImplTrait;

impl VisitMut for InferImplTrait {
    fn visit_type_mut(&mut self, ty: &mut Type) {
        if let Type::ImplTrait(_) = ty {
            *ty = syn::parse_quote!(_);
        } else {
            visit_type_mut(self, ty);
        }
    }
}
