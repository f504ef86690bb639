const choice = document.getElementById("class"), shown = document.getElementById("shown");
const figures = [...document.querySelectorAll("figure")];
choice.addEventListener("change", () => {
  for (const figure of figures)
    figure.hidden = choice.value !== "" && !JSON.parse(figure.dataset.classes).includes(choice.value);
  shown.textContent = figures.filter(figure => !figure.hidden).length;
});
